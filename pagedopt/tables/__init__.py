"""Pointer tables: their layout in memory, and addresses that follow the tensors."""
