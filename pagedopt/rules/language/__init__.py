"""A rule's text read once, and written for each of its readings: CUDA, Numba, tensors."""
