"""What is run beside training, on a config, a run or several; nothing in the trainer imports it."""
