"""``python -m pagedopt``: the command line of commands/main.py."""

from pagedopt.commands.main import program
from pagedopt.commands.process import end

if __name__ == "__main__":
    end(program())
