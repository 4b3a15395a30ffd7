"""The command `hfgolf profile`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["profile", *sys.argv[1:]])
