"""From text to batches: corpus, tokenizer, token_cache and batches, each using the ones before it.

Knows the data and tokenizer sections of the config; nothing of models, optimizers or the loop.
"""
