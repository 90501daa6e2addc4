"""Launches kernels: joins rules, formats, pointer tables and transports, which do not know each other."""
