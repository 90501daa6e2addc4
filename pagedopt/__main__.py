"""`python -m pagedopt` is the command line in cli.py."""

import sys

from pagedopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
