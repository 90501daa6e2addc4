"""The CUDA driver and its virtual memory."""
