"""`python -m pagedopt` is the command line in commands/main.py."""

import sys

from pagedopt.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
