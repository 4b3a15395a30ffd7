"""The command `hfgolf plan`, by its path."""

from hfgolf.command_line import run_command
from hfgolf.commands.plan import main

if __name__ == "__main__":
    run_command(main)
