"""The command `hfgolf watch`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["watch", *sys.argv[1:]])
