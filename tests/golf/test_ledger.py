"""The gate: bytes as they are on disk, against one decimal number."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hfgolf.checkpoint.identity import config_changes
from hfgolf.config.parse import load_config
from hfgolf.data.tokenizer import tokenizer_sha256
from hfgolf.golf import ledger
from hfgolf.golf.artifact import config_header, encode
from hfgolf.golf.ledger import budget_problem, read_ledger, training_config
from hfgolf.golf.merges import pack_tokenizer

CAP = 16_000_000


def ledger_of(files, count, budget_bytes):
    """Return the ledger of files of which the last counts only if everything does."""
    both = ("challenge", "everything")
    return read_ledger(dict.fromkeys(files[:2], both) | dict.fromkeys(files[2:], both[1:]), count, budget_bytes)


@pytest.fixture
def files(tmp_path):
    """Return (score.py, artifact.bin, tokenizer.json.xz): 6,000, 15,994,000 and 40,000 bytes."""
    sizes = {"score.py": 6_000, "artifact.bin": 15_994_000, "tokenizer.json.xz": 40_000}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    return [tmp_path / name for name in sizes]


def test_budget_itself_fits_and_one_byte_more_does_not(files):
    assert budget_problem(ledger_of(files, "challenge", CAP)) is None
    with files[1].open("ab") as file:
        file.write(b"!")
    problem = budget_problem(ledger_of(files, "challenge", CAP))
    assert problem.startswith(
        "16,000,001 bytes are 1 more than the budget of 16,000,000:"
        " artifact.bin could give 1 of its 15,994,001, score.py could give 1 of its 6,000."
    )
    assert "tokenizer" not in problem and "\n" not in problem


def test_counting_everything_includes_tokenizer_and_config(files):
    found = ledger_of(files, "everything", CAP)
    assert found["totals"] == {"everything": 16_040_000, "challenge": CAP}
    problem = str(budget_problem(found))
    for said in (
        "40,000 more than",
        "json.xz could give 40,000 of its 40,000",
        "score.py could give 6,000 of its 6,000",
    ):
        assert said in problem
    files[1].write_bytes(bytes(16 * 2**20 - 6_000))  # a megabyte is decimal
    assert "777,216 more than" in str(budget_problem(ledger_of(files, "challenge", CAP)))


def text_problem(folder, tokenizer, text, vocab_size, **certified):
    """Return what is wrong with the text of an export: tokens, bytes, tokenizer and certificate."""
    ids, eos = tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id
    token_bytes = [0, *(len(tokenizer.decode(number).encode()) for number in ids)]
    config = config_header({"vocab_size": vocab_size, "eos_token_id": eos})
    certificate = {
        "num_tokens": len(token_bytes),
        "num_bytes": sum(token_bytes),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    } | certified
    files = {
        ledger.ARTIFACT: encode(config, {}).data,
        ledger.TOKENIZER: pack_tokenizer(tokenizer.backend_tokenizer),
        ledger.TOKENS: np.array([eos, *ids], "<u2" if vocab_size <= 2**16 else "<u4").tobytes(),
        ledger.TOKEN_BYTES: np.array(token_bytes, "<u2").tobytes(),
        ledger.CERTIFICATE: json.dumps(certificate).encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return ledger._text_problem(folder, ())


@pytest.mark.parametrize("vocab_size", [257, 65_600])
def test_tokens_have_as_many_bytes_as_the_embedding_has_rows_whatever_the_tokenizer_has(
    tmp_path, tokenizer, vocab_size
):
    assert text_problem(tmp_path, tokenizer, "to be", vocab_size) is None
    assert text_problem(tmp_path, tokenizer, "to be", vocab_size, num_bytes=9).endswith("num_bytes differ.")


def test_a_certificate_without_a_hash_is_refused(tmp_path, sentencepiece_like):
    """Also for a tokenizer whose text cannot be hashed from its tokens."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like(), eos_token="</s>")
    assert text_problem(tmp_path, tokenizer, "the", 400) is None
    assert text_problem(tmp_path, tokenizer, "the", 400, sha256=None).endswith("sha256 differ.")


STATED = ["--run.name=a", "--data.source=files", "--data.files=[texts/a.txt, texts/b.txt]", "--train.max_steps=9"]


@pytest.mark.parametrize(
    "of_a_resume",
    [
        ["--train.resume=auto"],
        ["--run.name=b", "--run.output_dir=elsewhere", "--data.cache_dir=elsewhere"],
        ["--data.files=[/elsewhere/a.txt, /elsewhere/b.txt]"],
        ["--train.cpu_threads=3", "--batch.micro_batch_size=2", "--data.num_workers=2", "--data.in_memory=true"],
        ["--train.log_every_steps=3", "--train.save_every_steps=3", "--golf.forecast_every_steps=3"],
        ["--track.trackers=[tensorboard]", "--run.price_per_hour=3"],
    ],
)
def test_the_counted_config_does_not_depend_on_what_a_resume_may_change(of_a_resume):
    assert training_config(load_config(STATED + of_a_resume).config) == training_config(load_config(STATED).config)


def test_the_counted_config_trains_the_model_again(tmp_path):
    stated = [*STATED, "--optim.learning_rate=0.003", "--golf.qat_fraction=0.5", "--golf.budget_bytes=60000"]
    before = load_config(stated).config
    (tmp_path / "config.yaml").write_text(training_config(before))
    again = load_config(tmp_path / "config.yaml")
    assert set(config_changes(before.flat(), again)) == {"data.files"}, "whose names are the same"
    assert again.config.golf == before.golf
