"""`python -m pagedopt` is the command line in commands/main.py."""

import sys

from pagedopt.commands.main import program

if __name__ == "__main__":
    sys.exit(program())
