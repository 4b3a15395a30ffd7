"""The command `hfgolf export`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
