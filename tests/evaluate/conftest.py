"""The fixtures of tests/tiny_streams.py."""

from tiny_streams import accelerator, build_model, sentencepiece_like, stream, tokenize, tokenizer

__all__ = ["accelerator", "build_model", "sentencepiece_like", "stream", "tokenize", "tokenizer"]
