"""The command `hfgolf find_lr`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["find_lr", *sys.argv[1:]])
