"""Counting and measuring: FLOPs, memory, what the device can do."""
