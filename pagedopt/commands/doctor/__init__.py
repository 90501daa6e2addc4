"""``python -m pagedopt doctor``: find out what this machine can do by trying it."""
