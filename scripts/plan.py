"""The command `hfgolf plan`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
