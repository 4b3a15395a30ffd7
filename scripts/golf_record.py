"""The command `hfgolf golf record`, by its path."""

from hfgolf.cli import main

if __name__ == "__main__":
    main(verb="golf record")
