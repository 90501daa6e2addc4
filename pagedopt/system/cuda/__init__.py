"""The CUDA driver, and memory that it maps."""
