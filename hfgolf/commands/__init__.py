"""The verbs of the command `hfgolf`, one file each: its options, one call, and what is printed."""
