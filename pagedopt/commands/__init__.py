"""The command line: what python -m pagedopt can do."""
