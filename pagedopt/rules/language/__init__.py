"""The translator of rules: parses a function once, and generates CUDA, Numba and tensor code from it."""
