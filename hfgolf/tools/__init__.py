"""Tools around training that work on a config, a run or several runs. Nothing in the trainer imports them."""
