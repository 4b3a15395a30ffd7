"""hfgolf evaluate: the run's own figures, any causal model, and one line for every mistake."""

from __future__ import annotations

import json
import math
import re
from functools import partial

import pytest
import torch
from tokenizers import normalizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


@pytest.fixture
def evaluate(hfgolf):
    """Run the command and return (exit status, stdout, stderr)."""
    return partial(hfgolf, "evaluate")


def gpt2(folder, tokenizer):
    """Save a GPT-2, whose forward does not have our arguments, with a tokenizer; return the folder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def foreign(tmp_path, tokenizer):
    return gpt2(tmp_path / "gpt2", tokenizer)


def test_script_agrees_with_the_run_on_its_validation_text(
    run, tiny_run, tmp_path, corpus_file, evaluate, reset_accelerate
):
    val = tmp_path / "val.txt"
    val.write_text(corpus_file.read_text(encoding="utf-8")[-4000:], encoding="utf-8")
    folder = run(tiny_run(data__val_files=f"[{val}]", train__mixed_precision="bf16"))
    summary = json.loads((folder / "summary.json").read_text())
    reset_accelerate()
    settings = ("--model", folder, "--files", val, "--mixed_precision", "bf16")
    status, printed, _ = evaluate(*settings, "--json")
    figures = json.loads(printed)
    assert status == 0
    assert figures["bits_per_byte"] == pytest.approx(summary["val_bits_per_byte"], abs=1e-6)
    assert figures["loss"] == pytest.approx(summary["val_loss"], abs=1e-6)
    assert figures["num_bytes"] == val.stat().st_size == summary["val_bytes"]
    assert figures["num_tokens"] == val.stat().st_size  # tokens are bytes
    assert (figures["sequence_length"], figures["mixed_precision"]) == (32, "bf16")
    in_pairs = json.loads(evaluate(*settings, "--json", "--batch_size", 2)[1])
    assert (figures["batch_size"], in_pairs["batch_size"]) == (64, 2)  # 2,048 tokens at once are fast on a CPU
    assert in_pairs["loss"] == pytest.approx(figures["loss"], abs=1e-6)


def test_modes_differ_in_context_and_report_their_coverage(foreign, tmp_path, evaluate):
    (tmp_path / "a.txt").write_text("some text, longer than a window\n")
    (tmp_path / "b.txt").write_text("more")
    common = ("--model", foreign, "--files", tmp_path / "*.txt", "--sequence_length", 8, "--json")

    def figures(*options):
        status, printed, error = evaluate(*common, *options)
        assert (status, error) == (0, "")
        return json.loads(printed)

    flat = figures()
    whole = {"window": 8, "num_scored": 37, "num_unscored": 1, "first_target": 1, "last_target": 37}
    whole |= {"tail": "scored", "separators": "scored"}
    assert flat["coverage"] == whole | {"mode": "flat", "stride": 8}
    assert flat["bits_per_byte"] == pytest.approx(flat["loss"] * 37 / math.log(2) / 36)
    assert flat["perplexity"] == pytest.approx(math.exp(flat["loss"]))
    full_stride = figures("--evaluation", "sliding", "--stride", 8)
    assert full_stride["loss"] == flat["loss"]
    sliding = figures("--evaluation", "sliding")
    assert sliding["coverage"] == whole | {"mode": "sliding", "stride": 4}
    documents = figures("--evaluation", "documents", "--stride", 4)
    assert documents["coverage"] == whole | {"mode": "documents", "stride": 4}
    assert len({flat["loss"], sliding["loss"], documents["loss"]}) == 3
    assert {each["num_bytes"] for each in (flat, sliding, documents)} == {36}
    apart = figures("--evaluation", "documents", "--skip_separators")
    assert (apart["num_tokens"], apart["num_bytes"], apart["coverage"]["num_unscored"]) == (36, 36, 2)
    dropped = figures("--drop_tail")  # the last row has 5 targets, a separator and "more"
    assert (dropped["num_tokens"], dropped["num_bytes"], dropped["coverage"]["tail"]) == (32, 32, "dropped")


def test_tasks_need_lm_eval_and_only_their_own_options(foreign, evaluate, monkeypatch):
    monkeypatch.setattr("hfgolf.commands.evaluate_tasks.find_spec", lambda name: None)
    for options, message in (
        ((), "--tasks: needs the package lm-eval; run `pip install lm-eval`."),
        (("--stride", 4), "--stride: is for --files; lm-eval's tasks say themselves how they are scored."),
        (
            ("--certificate", "a.json"),
            "--certificate: is for --files; lm-eval's tasks say themselves how they are scored.",
        ),
        (("--files", "a.txt"), "--files: not allowed with argument --tasks."),
    ):
        status, printed, error = evaluate("--model", foreign, "--tasks", "hellaswag", *options)
        assert (status, printed, error) == (2, "", f"error: {message}\n")


@pytest.fixture
def texts(tmp_path):
    """Two files of text that repeats."""
    (tmp_path / "a.txt").write_text("to be or not to be, " * 4)
    (tmp_path / "b.txt").write_text("that is the question; " * 4)
    return tmp_path / "[ab].txt"


@pytest.mark.parametrize("windows", [("flat",), ("documents", "--stride", 8)])
def test_test_time_training_is_legal_and_learns_repeated_text(foreign, texts, evaluate, windows):
    common = ("--model", foreign, "--files", texts, "--json", "--evaluation", *windows)
    plain = json.loads(evaluate(*common).out)
    status, printed, error = evaluate(*common, "--adapt_rate", 0.01, "--check_legality")
    adapted = json.loads(printed)
    assert (status, error) == (0, "")
    assert (plain["adapt_rate"], adapted["adapt_rate"]) == (0.0, 0.01)
    assert adapted["num_tokens"] == plain["num_tokens"] == adapted["coverage"]["num_scored"]
    assert adapted["bits_per_byte"] < plain["bits_per_byte"] - 0.1
    assert plain["legality"] is None and adapted["legality"]["checked_tokens"] > 10


@pytest.mark.parametrize("adapt_rate", [0, 0.01])
def test_the_guarded_score_is_the_score(foreign, texts, evaluate, adapt_rate):
    common = ("--model", foreign, "--files", texts, "--json", "--evaluation", "sliding", "--stride", 8)
    common += ("--adapt_rate", adapt_rate)
    plain, guarded = (json.loads(evaluate(*common, *options).out) for options in ([], ["--check_legality"]))
    for name in ("loss", "num_tokens", "num_bytes", "coverage"):
        assert guarded[name] == (pytest.approx(plain[name], rel=1e-5) if name == "loss" else plain[name])
    assert guarded["legality"]["checked_tokens"] >= guarded["num_tokens"] // 16


def test_illegal_scorer_gets_no_score(foreign, texts, evaluate, monkeypatch):
    real = GPT2LMHeadModel.forward

    def peeking(self, input_ids, **options):
        output = real(self, input_ids, **options)
        output.logits[:, :-1].scatter_(2, input_ids[:, 1:, None], 9.0)
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", peeking)
    status, printed, error = evaluate("--model", foreign, "--files", texts, "--check_legality")
    assert (status, printed) == (1, "")
    assert re.fullmatch(
        r"no score: the scorer is not legal: the distributions of tokens 1 to \d+ depend on .*\n", error
    )


def test_certificate_accompanies_the_score(foreign, texts, tmp_path, evaluate):
    path = tmp_path / "certificate.json"
    common = ("--model", foreign, "--files", texts, "--certificate", path)
    status, printed, _ = evaluate(*common)
    assert status == 0 and "training text not known" in printed
    assert json.loads(path.read_text())["holds"]
    assert json.loads(evaluate(*common, "--json").out)["certificate"] in printed
    (tmp_path / "train.txt").write_text("nothing of that")
    status, printed, _ = evaluate(*common, "--train_files", tmp_path / "train.txt")
    assert status == 0 and "none of them among 1 training document" in printed
    (tmp_path / "copy.txt").write_bytes((tmp_path / "b.txt").read_bytes())
    status, printed, error = evaluate(*common, "--train_files", tmp_path / "train.txt", tmp_path / "copy.txt")
    assert (status, printed) == (1, "")
    assert error.startswith("no score: No certificate: 1 of 2 validation documents are also training documents")
    assert json.loads(path.read_text())["holds"] is False


def test_tokenizer_that_rewrites_text_gets_no_bits_per_byte(tmp_path, sentencepiece_like, evaluate):
    rewriting = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like(normalizers.NFKC()), eos_token="</s>")
    model = gpt2(tmp_path / "model", rewriting)
    (tmp_path / "a.txt").write_text("one \ufb01ne \ufb01sh", encoding="utf-8")
    arguments = ("--model", model, "--files", tmp_path / "a.txt")
    score = json.loads(evaluate(*arguments, "--json").out)
    status, printed, error = evaluate(*arguments, "--certificate", tmp_path / "certificate.json")
    assert (status, printed) == (1, "")
    assert "first in document 0, character 4: '\\ufb01ne \\ufb01sh' became 'fine fish'" in error
    relabeled = score["loss"] * score["num_tokens"] / math.log(2) / len("one fine fish")
    assert f"no score: it would be {relabeled:.4f} bits per byte of the normalized text (13 bytes)\n" in error
    assert f"no score: it would be {relabeled * 13 / 15:.4f} bits per raw byte (15 bytes)\n" in error
