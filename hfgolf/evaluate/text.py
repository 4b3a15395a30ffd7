"""Tokenize text files with a model's own tokenizer, to evaluate the model on them.

Owns the path from files to a temporary token stream. The data package does the reading and encoding.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from hfgolf.config import DataConfig, TokenizerConfig
from hfgolf.data.token_cache import load_tokens
from hfgolf.errors import UserError
from hfgolf.evaluate.context import require_embedded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfgolf.data.token_stream import TokenStream


def tokenize_files(
    files: list[str], tokenizer: PreTrainedTokenizerBase, vocab_size: int, text_column: str, folder: Path
) -> TokenStream:
    """Encode every document in `files` (paths, globs or URLs, like data.files) into a stream stored in `folder`.

    vocab_size: number of entries in the model's embedding. Raises UserError if no file matches, a file is empty or not
    UTF-8, the tokenizer has no end-of-text token, or it returns an id outside the embedding.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token_id is None:
        raise UserError(
            "--model: evaluation needs a fast tokenizer with an eos_token to separate documents; use a model that has"
            " one."
        )
    tokenizer.save_pretrained(folder / "tokenizer")
    unread = folder / "train.txt"  # a corpus needs a train split, but nothing reads this one
    unread.write_text("unread")
    data = DataConfig(
        source="files",
        files=[str(unread)],
        val_files=files,
        text_column=text_column,
        cache_dir=str(folder / "cache"),
        in_memory=False,
    )
    pretrained = TokenizerConfig(kind="pretrained", name_or_path=str(folder / "tokenizer"))
    try:
        stream = load_tokens(data, pretrained).val
    except UserError as error:
        message = str(error).replace("data.val_files", "--files").replace("data.text_column", "--text_column")
        raise UserError(message) from None
    require_embedded(int(stream.tokens.max()), vocab_size)
    return stream
