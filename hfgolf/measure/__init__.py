"""Count FLOPs, and predict and measure memory."""
