"""The optimizer, its parameter groups and its schedule. Nothing here knows about data, models or the training loop."""
