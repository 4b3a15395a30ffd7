"""The real client of the Hub reads a dataset by its name, as it comes, and files by their URL."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset
from hub_server import Repository, serving

END_OF_TEXT, END = 256, 260
_READ = """
import json, os, sys
from hfgolf.config.sections import DataSection, TokenizerSection
from hfgolf.data.token_cache import load_tokens
places = [
    dict(source="hub", hub_name="somebody/texts", streaming=True),
    dict(source="hub", hub_name="somebody/texts", streaming=True, ids_column="ids"),
    dict(source="hub", hub_name="somebody/texts", streaming=True, messages_column="messages"),
    dict(source="files", files=["hf://datasets/somebody/texts/*.parquet"]),
]
for place in places:
    tokens = load_tokens(DataSection(cache_dir=sys.argv[1], val_fraction=0.3, **place), TokenizerSection(kind="byte"))
    masks = [None if stream.is_target is None else stream.is_target.tolist() for stream in (tokens.train, tokens.val)]
    print(json.dumps([[tokens.train.tokens.tolist(), masks[0]], [tokens.val.tokens.tolist(), masks[1]]]))
print([name for _, _, names in os.walk(os.environ["HF_DATASETS_CACHE"]) for name in names if ".arrow" in name])
"""


@pytest.mark.slow
def test_dataset_of_the_hub_is_streamed_as_text_ids_and_messages_and_read_by_url(tmp_path):
    texts = [f"document {row}" for row in range(40)]
    chats = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}] for text in texts]
    written = io.BytesIO()
    Dataset.from_dict({"text": texts, "ids": [list(t.encode()) for t in texts], "messages": chats}).to_parquet(written)
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_CACHE": str(tmp_path / "copies")}
    environment = os.environ | environment | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    with serving() as server:
        server.repositories["datasets/somebody/texts"] = Repository(files={"train.parquet": written.getvalue()})
        environment["HF_ENDPOINT"] = server.endpoint
        command = [sys.executable, "-c", _READ, str(tmp_path / "cache")]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    *lines, copies = process.stdout.splitlines()
    assert copies == "[]"
    for number, line in enumerate(lines):
        found = []
        for ids, is_target in json.loads(line):
            kept = np.array(ids) if is_target is None else np.array(ids)[np.array(is_target) == 1]
            parts = np.split(kept, np.flatnonzero(kept == (END if number == 2 else END_OF_TEXT)))
            found += [bytes(part[part < END_OF_TEXT].tolist()).decode() for part in parts]
        assert sorted(filter(None, found)) == sorted(texts)
