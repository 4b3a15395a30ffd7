"""The command `hfgolf prepare`, by its path."""

from hfgolf.cli import main

if __name__ == "__main__":
    main(verb="prepare")
