"""Numba functions that are compiled from generated text and cached on disk."""
