"""The command `hfgolf generate`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
