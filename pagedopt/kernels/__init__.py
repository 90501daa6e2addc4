"""The CUDA text and its CPU twin: sources, compilers, launchers."""
