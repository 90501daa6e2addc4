"""Estimates of the memory and time that training will take, from measured rates of a machine."""
