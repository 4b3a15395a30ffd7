"""Judging a model: loss and bits per byte of a text, and samples."""
