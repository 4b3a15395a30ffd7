"""The command `hfgolf find_lr`, by its path."""

from hfgolf.cli import main

if __name__ == "__main__":
    main(verb="find_lr")
