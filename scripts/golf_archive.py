"""The command `hfgolf golf archive`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["golf", "archive", *sys.argv[1:]])
