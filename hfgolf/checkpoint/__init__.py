"""Checkpoints: folders that are either complete or absent, their contents, and the run they belong to."""
