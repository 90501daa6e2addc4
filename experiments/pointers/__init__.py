"""Which way should a list of pointers take into a kernel, and what decides it?"""

NAME = "pointer_transports"
PARTS = ("attempts", "transports")
