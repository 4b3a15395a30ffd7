"""Tokenize text files with a model's own tokenizer, to evaluate the model on them.

Owns the path from files to a temporary token stream. The data package does the reading and encoding.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.corpus import Corpus, load_corpus
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.evaluate.context import require_embedded
from hfgolf.system.errors import UserError

_OPTIONS = {
    "data.val_files": "--files",
    "data.files": "--train_files",
    "data.text_column": "--text_column",
    "set data.encoding to it": "convert it to UTF-8",
    "set data.encoding": "convert it to UTF-8 from",
}
_ADVICE_OF_A_RUN = re.compile(r"; [^;]*\bdata\.(source|messages_column|ids_column)\b[^;]*?(?=;|\.$)")


def tokenize_files(
    files: list[str],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    text_column: str,
    folder: Path,
    train_files: list[str] | None = None,
    encoding: str | None = None,
) -> tuple[Corpus, TokenCache]:
    """Encode every document in `files` (paths, globs or URLs, like data.files) into a cache in `folder`, as its `val`.

    vocab_size: number of entries in the model's embedding. train_files: text that the model was trained on, to compare
    with; None: the train split is a placeholder. encoding: as data.encoding.

    Raises UserError if no file matches, a file is empty or not UTF-8, the tokenizer has no end-of-text token, or it
    returns an id outside the embedding.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token_id is None:
        raise UserError(
            "--model: evaluation needs a fast tokenizer with an eos_token to separate documents; use a model that has"
            " one."
        )
    tokenizer.save_pretrained(folder / "tokenizer")
    unread = folder / "train.txt"  # a corpus needs a train split
    unread.write_text("unread")
    data = DataSection(
        source="files",
        files=train_files or [str(unread)],
        val_files=files,
        text_column=text_column,
        encoding=encoding,
        cache_dir=str(folder / "cache"),
        in_memory=False,
    )
    pretrained = TokenizerSection(kind="pretrained", name_or_path=str(folder / "tokenizer"))
    try:
        corpus = load_corpus(data)
        tokens = load_tokens(data, pretrained, corpus)
    except UserError as error:
        message = _ADVICE_OF_A_RUN.sub("", str(error))
        for key, ours in _OPTIONS.items():
            message = message.replace(f"--{key}", ours).replace(key, ours)
        raise UserError(message) from None
    require_embedded(int(tokens.val.tokens.max()), vocab_size)
    return corpus, tokens
