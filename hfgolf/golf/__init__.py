"""Golf: the best model that fits in a number of bytes. Quantize, pack, score and verify."""
