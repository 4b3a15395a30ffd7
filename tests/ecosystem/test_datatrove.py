"""What datatrove's own tokenizer writes is read as hfgolf's own tokens: `make test-ecosystem`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.token_cache import load_tokens

pytest.importorskip("datatrove", reason="datatrove is not installed; run make test-ecosystem")

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenize_with_datatrove.py"


def test_tokens_of_datatroves_executor_are_hfgolfs_own_and_train(run, tiny_run, tmp_path):
    files = {"train": [tmp_path / f"text/train/{part}.parquet" for part in range(3)]}
    files["val"] = [tmp_path / "text/val/0.parquet"]
    for path in files["train"] + files["val"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [f"{path}, row {row}: naïve\r\n{row**3} 🌍 and one more line" for row in range(40)]
        pq.write_table(pa.table({"text": rows}), path)
    names = {split: [str(path) for path in paths] for split, paths in files.items()}
    text = DataSection(
        source="files", files=names["train"], val_files=names["val"], cache_dir=str(tmp_path / "of hfgolf")
    )
    own = load_tokens(text, TokenizerSection(kind="bpe", vocab_size=400))
    own.tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokenizer = tmp_path / "tokenizer" / "tokenizer.json"
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "text"), str(tokenizer), str(tmp_path / "tokens")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    options = {"data__source": "shards", "tokenizer__kind": "pretrained", "tokenizer__name_or_path": tokenizer}
    options |= {"data__files": tmp_path / "tokens/train", "data__val_files": tmp_path / "tokens/val"}
    folder = run(tiny_run(**options))
    summary = json.loads((folder / "summary.json").read_text())
    shards = DataSection(
        source="shards", files=[str(tmp_path / "tokens/train")], val_files=[str(tmp_path / "tokens/val")]
    )
    tokens = load_tokens(shards, TokenizerSection(kind="pretrained", name_or_path=str(tokenizer)))
    for split in ("train", "val"):
        begun_by_separators, ended_by_them = getattr(own, split).tokens, getattr(tokens, split).tokens
        assert np.array_equal(np.roll(begun_by_separators, -1), ended_by_them), split
    first = len(own.tokenizer.decode(tokens.val.tokens[:1]).encode())  # is only context
    assert own.val.num_bytes == tokens.val.num_bytes + first
    assert summary["val_bits_per_byte"] > 0
