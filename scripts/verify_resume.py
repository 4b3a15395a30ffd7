"""The command `hfgolf verify_resume`, by its path."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["verify_resume", *sys.argv[1:]])
