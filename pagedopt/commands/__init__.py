"""The command line, ``python -m pagedopt COMMAND``."""
