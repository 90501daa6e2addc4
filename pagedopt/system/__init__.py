"""Every call that leaves Python: the driver, the C library, files, processes, compilers' files."""
