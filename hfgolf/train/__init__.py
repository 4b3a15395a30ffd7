"""The training loop and what it needs around it: environment, run folder, checkpoints, tracking."""
