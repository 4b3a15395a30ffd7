"""Handing a model to others: the exported folder, its model card, the Hub."""
