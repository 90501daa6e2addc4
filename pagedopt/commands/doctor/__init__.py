"""``python -m pagedopt doctor``: what this machine can do, tried rather than asked for."""
