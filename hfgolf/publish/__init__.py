"""Publish a model: the exported folder, its model card, and the Hub."""
