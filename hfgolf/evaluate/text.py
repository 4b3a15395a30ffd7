"""Text files as the tokens of a model's own tokenizer, to be judged on them.

Owns the way from files to a stream that is not kept; reading and encoding are the data package's.
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
    """Encode every document of `files` (paths, globs, URLs; as data.files) into a stream that lies in `folder`.

    vocab_size: entries of the model's embedding. Raises UserError where no file matches, a file is empty or not UTF-8,
    the tokenizer has no end of text, or it gives an id that the model does not know.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token_id is None:
        raise UserError(
            "--model: its tokenizer is not a fast one with an eos_token, which must stand between documents; name a"
            " model that has one."
        )
    tokenizer.save_pretrained(folder / "tokenizer")
    unread = folder / "train.txt"  # a corpus has a train part, and here nobody reads it
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
        said = str(error).replace("data.val_files", "--files").replace("data.text_column", "--text_column")
        raise UserError(said) from None
    require_embedded(int(stream.tokens.max()), vocab_size)
    return stream
