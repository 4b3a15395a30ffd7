"""The command `hfgolf chat`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["chat", *sys.argv[1:]])
