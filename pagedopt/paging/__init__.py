"""Budgets, pages and their visits to the device, as arithmetic on plain values: no torch and no device."""
