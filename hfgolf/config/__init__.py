"""What a person says: every key with its bounds (sections), from files and the command line (parse)."""
