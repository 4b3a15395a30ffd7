"""Evaluate a model: its loss and bits per byte on a text, and samples."""
