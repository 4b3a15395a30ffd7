"""The optimizer, its parameter groups and its schedule; nothing here knows data, models or the training loop."""
