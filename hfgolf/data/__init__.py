"""From text to batches: corpus, tokenizer, token_cache and batches. Each module uses only the ones before it.

Knows the data and tokenizer sections of the config, and nothing about models, optimizers or the training loop.
"""
