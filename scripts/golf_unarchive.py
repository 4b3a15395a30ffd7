"""The command `hfgolf golf unarchive`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["golf", "unarchive", *sys.argv[1:]])
