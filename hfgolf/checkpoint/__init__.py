"""Checkpoints: folders that are complete or absent, what is in them, and which run they belong to."""
