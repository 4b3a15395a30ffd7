"""The command `hfgolf doctor`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["doctor", *sys.argv[1:]])
