"""Budgets, pages and their visits to the device, as arithmetic on numbers and arrays: no torch and no device."""
