"""A dataset's column of token ids trains like the text that the ids were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.corpus import load_corpus
from hfgolf.data.token_cache import TokenCache, load_tokens
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.system.errors import UserError

END = 256
BYTE = TokenizerSection(kind="byte")
TEXTS = [f"Document {number} is a na\u00efve one of {number * 7} \u20ac." for number in range(40)]
ROWS = [list(text.encode()) for text in TEXTS]


def write_rows(folder: Path, kind: str, rows: list[Any], name: str = "train") -> str:
    """Write a table with a column of ids; return what data.files takes."""
    folder.mkdir(exist_ok=True)
    table = Dataset.from_dict({"input_ids": rows, "text": [str(number) for number in range(len(rows))]})
    if kind == "disk":
        table.save_to_disk(folder / name)
        return str(folder / name / "*.arrow")
    path = folder / f"{name}.{kind}"
    {"jsonl": table.to_json, "parquet": table.to_parquet}[kind](path)
    return str(path)


def tokens_of(tmp_path: Path, rows: list[Any], kind: str = "jsonl", **options: Any) -> TokenCache:
    files = [write_rows(tmp_path / "rows", kind, rows)]
    options = {"val_fraction": 0.3, "cache_dir": str(tmp_path / "cache"), **options}
    return load_tokens(DataSection(source="files", files=files, ids_column="input_ids", **options), BYTE)


def documents(stream: Any) -> list[list[int]]:
    return [part[1:].tolist() for part in np.split(stream.tokens, np.flatnonzero(stream.tokens == END))[1:]]


@pytest.mark.parametrize("kind", ["parquet", "disk"])
def test_rows_are_documents_and_their_bytes_those_of_the_decoded_text(tmp_path, kind):
    tokens = tokens_of(tmp_path, ROWS, kind)
    train, val = documents(tokens.train), documents(tokens.val)
    assert train and val and sorted(train + val) == sorted(ROWS)
    assert train == [row for row in ROWS if row in train]  # in order
    assert tokens.val.num_bytes == sum(map(len, val)) == bytes_per_token(tokens.val, tokens.tokenizer).sum()
    assert tokens.val.piece_tokens.tolist() == [len(row) + 1 for row in val]
    assert tokens.tokenizer_loss is None
    again = tokens_of(tmp_path, ROWS, kind)
    assert again.is_hit and again.path == tokens.path


def test_separators_in_a_row_end_documents(tmp_path):
    rows = [[END, 65, 66, END, 67], [68, END], [END], [], [69]]
    validation = write_rows(tmp_path / "rows", "jsonl", [[END, 97, END, 98, 99, END]], "val")
    tokens = tokens_of(tmp_path, rows, val_files=[validation])
    assert documents(tokens.train) == [[65, 66], [67], [68], [69]]
    assert documents(tokens.val) == [[97], [98, 99]] and tokens.val.piece_bytes.tolist() == [1, 2]


def test_ids_that_the_tokenizer_would_not_make_are_told(tmp_path):
    tokens = tokens_of(tmp_path, [[*row, 0xFF] for row in ROWS])  # not UTF-8, so it decodes to U+FFFD
    message = "of the text of 15 of 15 documents in a sample than data.ids_column input_ids has"
    assert len(tokens.val.piece_tokens) == 15 and message in str(tokens.tokenizer_loss)
    with pytest.raises(UserError, match="stand for"):
        bytes_per_token(tokens.val, tokens.tokenizer)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[65, 300]] * 9, r"train.jsonl#\d contains id 300, but the tokenizer has 257 entries"),
        ([[65, -1]] * 9, r"row 0 \(line 1\): 'input_ids' holds a list with -1, not of token ids"),
        ([[65, 1.5]] * 9, r"row 0 \(line 1\): 'input_ids' holds a list with 65.0, not of token ids"),
        (["some text"] * 9, "'input_ids' holds text, not a list of token ids; name a column of text by"),
        ([[65]], "split of data.source files is empty: too few documents have token ids"),
    ],
)
def test_fault_is_one_line(tmp_path, rows, message):
    with pytest.raises(UserError, match=message) as caught:
        tokens_of(tmp_path, rows)
    assert "\n" not in str(caught.value)


def test_missing_column_and_text_of_a_column_of_ids_are_one_line(tmp_path):
    files = [write_rows(tmp_path / "rows", "jsonl", ROWS)]
    data = {"source": "files", "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=r"has no column 'ids'; set data\.ids_column to one of: input_ids, text"):
        load_tokens(DataSection(files=files, ids_column="ids", **data), BYTE)
    tokens = {"ids_column input_ids": data | {"ids_column": "input_ids"}}
    tokens["source shards"] = data | {"source": "shards", "val_files": files}
    for key, settings in tokens.items():
        with pytest.raises(UserError, match=f"data.{key} holds tokens, not text"):
            load_corpus(DataSection(files=files, **settings)).write_pieces(tmp_path / "text")
