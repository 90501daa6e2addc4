"""Functions that Numba compiles from text, and keeps."""
