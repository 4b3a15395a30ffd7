"""A tiny model with random weights, a byte tokenizer, and a stream of two documents in three pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.corpus import Corpus, load_corpus
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.data.tokenizer import find_tokenizer
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM


@dataclass(frozen=True)
class ListedStream:
    tokens: np.ndarray
    piece_tokens: np.ndarray
    piece_bytes: np.ndarray
    is_target: np.ndarray | None = None

    def read(self, places: np.ndarray) -> np.ndarray:
        return self.tokens[places]


class CausalSum(torch.nn.Module):
    """A causal model whose logits depend on all inputs so far, and on their order."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = torch.nn.Embedding(vocab_size, 16), torch.nn.Linear(16, vocab_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, inputs.shape[-1] + 1)[:, None]
        return self.head((self.embedding(inputs) * places).cumsum(-2).tanh())


@torch.no_grad()
def plain_nats(logits: Callable[[torch.Tensor], torch.Tensor], tokens: np.ndarray, windows: Any) -> float:
    """Return the nats of windows, each its first input, first target and last target, one after the other."""
    ids, total = torch.from_numpy(tokens.astype(np.int64)), 0.0
    for begin, first, last in windows:
        losses = F.cross_entropy(logits(ids[None, begin:last])[0], ids[begin + 1 : last + 1], reduction="none")
        total += losses[first - begin - 1 :].double().sum().item()
    return total


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return find_tokenizer(TokenizerSection(kind="byte"), {}, Path("unused"))


@pytest.fixture
def build_model(tokenizer):
    def build(**changes: Any) -> GolfForCausalLM:
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
        eos = tokenizer.eos_token_id
        model = GolfForCausalLM(GolfConfig(**{"vocab_size": 257, "eos_token_id": eos, **shape, **changes}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return model

    return build


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture
def stream() -> ListedStream:
    """Pieces of 20, 33 and 11 tokens. The first and the last start with end-of-text, which counts no bytes."""
    tokens = np.random.default_rng(0).integers(0, 256, 64).astype(np.uint16)
    tokens[[0, 53]] = 256
    return ListedStream(tokens, np.array([20, 33, 11], np.uint32), np.array([19, 40, 10], np.uint32))


@pytest.fixture(scope="session")
def sentencepiece_like() -> Callable[..., Tokenizer]:
    """Return a function that builds a tokenizer with Llama's rules, and a normalizer in front of them.

    They put a space in front of a text, spell spaces U+2581, and characters without an entry as bytes.
    """

    def build(normalizer: Any = None) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.Sequence(
            [*([normalizer] if normalizer else []), normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.train_from_iterator(
            ["the end of the naive cafe two spaces tab, words and the rest;" * 20],
            trainers.BpeTrainer(vocab_size=90, special_tokens=["</s>"], show_progress=False),
        )
        rules = json.loads(tokenizer.to_str())
        rules["model"] |= {"byte_fallback": True}
        for byte in range(256):
            rules["model"]["vocab"][f"<0x{byte:02X}>"] = len(rules["model"]["vocab"])
        tokenizer = Tokenizer.from_str(json.dumps(rules))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return tokenizer

    return build


@pytest.fixture
def tokenize(tmp_path: Path) -> Callable[..., tuple[Corpus, TokenCache]]:
    """Return a function that tokenizes validation documents with a kind of tokenizer, or with a given one."""

    def tokenize_(kind: str | Tokenizer, *documents: str, train: str = "") -> tuple[Corpus, TokenCache]:
        (tmp_path / "train0.txt").write_text("the end of the naive cafe, two spaces and a tab " * 40)
        (tmp_path / "train1.txt").write_text(train or "another document")
        for number, text in enumerate(documents):
            (tmp_path / f"val{number}.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
        config = TokenizerSection(kind="bpe", vocab_size=280)
        if isinstance(kind, Tokenizer):
            fast = PreTrainedTokenizerFast(tokenizer_object=kind, eos_token="</s>")
            fast.save_pretrained(tmp_path / "tokenizer")
            config = TokenizerSection(kind="pretrained", name_or_path=str(tmp_path / "tokenizer"))
        elif kind == "case operators":
            config = TokenizerSection(vocab_size=280, case_operators=True)
        elif kind != "bpe":
            config = TokenizerSection(kind=kind)
        files = {"files": [str(tmp_path / "train*.txt")], "val_files": [str(tmp_path / "val*.txt")]}
        corpus = load_corpus(DataSection(source="files", cache_dir=str(tmp_path / "cache"), **files))
        return corpus, load_tokens(corpus.data, config, corpus)

    return tokenize_
