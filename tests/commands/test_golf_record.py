"""The statistics of records: published cases to the last printed digit, all seeds, both units, and what is refused."""

from __future__ import annotations

import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfgolf.commands.golf_record import Score, judge, welch_test

TOKENS, BYTES = 62_021_632, 151_078_221  # the challenge's validation split with 1,024 entries
SEQ_2048 = [1.20576485, 1.2061746, 1.20715923]
SEQ_4096 = [1.20143417, 1.19945102, 1.20319508]
RECORD_549 = [1.11922988, 1.12002032, 1.11888882]
RECORD_1019 = [1.11508120, 1.11437394, 1.11475014]


def as_scores(values: list[float]) -> list[Score]:
    return [Score(f"seed {number}", value, TOKENS, BYTES) for number, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("scores", "reference", "margin", "printed"),
    [
        (SEQ_2048, [1.21937], 0.0, {"t": "31.43", "p": "0.00051", "degrees_of_freedom": "2"}),
        (SEQ_2048, [1.22436570 - 0.005], 0.0, {"t": "31.42", "p": "0.00051"}),  # 1.21937, not yet rounded
        # t 9.06 was printed, from a rounded deviation
        (SEQ_4096, [1.21613611], 0.005, {"t": "9.04", "p": "0.006", "sd": "0.00187", "mean": "1.20136009"}),
        (RECORD_1019, RECORD_549, 0.0, {"t": "11.8339", "degrees_of_freedom": "3.3063", "reference": "1.11937967"}),
    ],
)
def test_published_records(scores, reference, margin, printed):
    test = welch_test(scores, reference, margin=margin, significance=0.01)
    for name, text in printed.items():
        assert f"{test[name]:.{len(text.partition('.')[2])}f}" == text, name


def test_margin_is_in_nats_per_token():
    """0.005 nats per token are 0.0030 bits per byte with 1,024 entries and 0.0019 with 8,192."""
    options = {"margin_nats": 0.005, "significance": 0.01, "left_out": {}}
    for tokens, bits in ((TOKENS, 0.0030), (40_540_160, 0.0019), (47_851_520, 0.0023)):
        figures = judge([Score(str(seed), seed, tokens, BYTES) for seed in (1, 2)], [Score("r", 1.2)], **options)
        assert figures["bits_per_byte"]["margin"] == pytest.approx(bits, abs=6e-5)
        assert figures["nats_per_token"]["margin"] == pytest.approx(0.005)
    nats = judge(as_scores(RECORD_1019), as_scores(RECORD_549), **options | {"margin_nats": 0.0})["nats_per_token"]
    assert (nats["lead"], nats["mean"]) == pytest.approx((0.00784215, 1.88217853), rel=1e-4)


def test_lead_needed_with_three_seeds():
    """t above 6.96; at a deviation of 0.0014 nats a lead of 0.0056 nats."""
    values = [1 - 0.0014, 1.0, 1 + 0.0014]
    assert statistics.stdev(values) == pytest.approx(0.0014)
    at_limit = 6.9646 * 0.0014 / math.sqrt(3)
    assert at_limit == pytest.approx(0.0056, abs=5e-5)
    for lead, is_enough in ((at_limit * 1.001, True), (at_limit * 0.999, False)):
        test = welch_test(values, [1 + lead], 0.0, 0.01)
        assert test["needed_t"] == pytest.approx(6.9646, abs=1e-4)
        assert (test["p"] < 0.01) is is_enough
        assert test["needed_seeds"] == (3 if is_enough else 4)


@pytest.mark.parametrize("reference", [[1.001], [1.0015, 1.0021, 1.0018]])
def test_needed_seeds_are_the_fewest_that_suffice(reference):
    random = np.random.default_rng(0)

    def sample(seeds: int) -> list[float]:
        """Return seeds with exactly this mean and deviation."""
        values = random.normal(size=seeds)
        values = (values - values.mean()) / values.std(ddof=1)
        return (1 + 0.0014 * values).tolist()

    needed = welch_test(sample(3), reference, 0.0, 0.01)["needed_seeds"]
    assert needed is not None and needed > 3
    assert welch_test(sample(needed), reference, 0.0, 0.01)["p"] < 0.01
    assert welch_test(sample(needed - 1), reference, 0.0, 0.01)["p"] >= 0.01


def test_no_number_of_seeds_proves_a_negative_lead():
    test = welch_test([1.0, 1.1], [1.0], 0.0, 0.01)
    assert test["p"] > 0.5 and test["needed_seeds"] is None


@pytest.fixture
def record(hfgolf) -> Any:
    """Run the script and return (exit status, stdout, stderr)."""
    return partial(hfgolf, "golf record")


@pytest.fixture
def files(tmp_path):
    """Return a function that writes scores as score.py and `hfgolf evaluate --json` print them."""

    def write(kind: str, values: list[float]) -> list[Path]:
        names = {"score": ("tokens", "bytes", "bpb"), "evaluate": ("num_tokens", "num_bytes", "bits_per_byte")}[kind]
        paths = [tmp_path / f"{kind}{number}.json" for number in range(len(values))]
        for path, value in zip(paths, values, strict=True):
            path.write_text(json.dumps(dict(zip(names, (TOKENS, BYTES, value), strict=True)) | {"nats": 9.0}))
        return paths

    return write


def test_script_decides_whether_a_record_holds(record, files):
    of_2048 = files("score", SEQ_2048)
    status, printed, error = record("--runs", *of_2048, "--reference", 1.2243657)
    assert (status, error) == (0, "")
    rows = printed.splitlines()
    assert rows[1].split() == ["score0", "2.03585", "1.20576", "-", "-"]
    assert "margin                       0.00500        0.00296" in rows
    assert rows[-2].startswith("one-sided t 36.") and rows[-1].startswith("Better than the reference by more than")
    status, printed, _ = record("--runs", *of_2048, "--reference", 1.212)
    assert status == 1 and printed.splitlines()[-1] == (
        "Not significant with 3 seeds; at this mean and this deviation it would be with 4 seeds."
    )
    status, printed, _ = record("--runs", *of_2048, "--reference_runs", *files("evaluate", SEQ_4096), "--json")
    figures = json.loads(printed)
    assert status == 1 and not figures["holds"] and figures["bits_per_byte"]["lead"] < 0
    assert [score["bits_per_byte"] for score in figures["references"]] == SEQ_4096
    _, numbers, _ = record("--runs", *of_2048, "--reference", *SEQ_4096, "--json")
    assert json.loads(numbers)["p"] == figures["p"]
    arguments = ("--runs", *of_2048, "--reference", 1.22, "--margin_nats", 0)
    status, printed, _ = record(*arguments, "--leave_out", "score2=its disk was full")
    assert status == 0 and "left out: score2, because its disk was full" in printed
    assert "1.20716" not in printed


@pytest.fixture
def run_folder(tmp_path):
    """Return a function that writes what golf_record reads of a finished run, and of its golf export."""

    def write(
        name: str,
        seed: int,
        bits: float,
        *,
        width: int = 64,
        num_bytes: int = 4000,
        exported: float | None = None,
        problems: tuple[str, ...] = (),
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        loss, text = bits * math.log(2) * num_bytes / 1000, {"val_tokens": 1000, "val_bytes": num_bytes}
        row = {"step": 10, "elapsed_seconds": 9.0, "data_seconds": 0.0, "compute_seconds": 8.0, "val_loss": loss}
        summary = {"weights": "raw", "val_loss": loss, "val_bits_per_byte": bits, "train_seconds": 12.0}
        metadata = {key: {} for key in ("sources", "environment", "hardware", "packages")} | {
            "seed": seed, "config": {"run.seed": seed, "model.hidden_size": width}, "commit": None,
        }  # fmt: skip
        (folder / "metrics.jsonl").write_text(json.dumps(row | text | {"train_losses": [loss] * 10}) + "\n")
        (folder / "summary.json").write_text(json.dumps(summary | text))
        (folder / "metadata.json").write_text(json.dumps(metadata))
        if exported is not None:
            after = {"bpb": exported, "tokens": 1000, "bytes": 4000}
            totals = {"count": "challenge", "totals": {"challenge": 499_000}}
            (folder / "golf").mkdir()
            (folder / "golf/ledger.json").write_text(json.dumps({"after": after, "problems": problems, **totals}))
        return folder

    return write


@pytest.mark.parametrize("is_exported", [False, True])
def test_runs_are_read_with_their_text_and_seconds_and_exported_ones_with_the_score_of_their_files(
    run_folder, record, is_exported
):
    score = {1: 1.521, 2: 1.522} if is_exported else {1: 1.501, 2: 1.502}
    runs = [
        run_folder(f"run-seed{seed}", seed, 1.5 + seed / 1000, exported=score[seed] if is_exported else None)
        for seed in (1, 2)
    ]
    status, printed, _ = record("--runs", *runs, "--reference", 1.6, "--json")
    figures = json.loads(printed)
    assert status == 0
    assert {each["name"]: each["bits_per_byte"] for each in figures["scores"]} == {
        f"run-seed{seed} (seed {seed})": bits for seed, bits in score.items()
    }
    assert figures["bits_per_byte"]["margin"] == pytest.approx(0.005 / math.log(2) * 1000 / 4000)
    assert [each["seconds"] for each in figures["scores"]] == [12.0, 12.0]
    assert {each["artifact_bytes"] for each in figures["scores"]} == {499_000 if is_exported else None}
    assert ("499,000" in record("--runs", *runs, "--reference", 1.6).out) is is_exported


def test_invalid_submission_is_one_line(run_folder, record, files, tmp_path):
    first, second = run_folder("first", 1, 1.5), run_folder("second", 2, 1.51)
    twin, wider = run_folder("twin", 2, 1.51), run_folder("wider", 3, 1.4, width=128)
    other_text = run_folder("other_text", 4, 1.5, num_bytes=5000)
    exported = [run_folder("exported", 5, 1.5, exported=1.5), run_folder("a", 6, 1.5, exported=1.5)]
    failed, damaged = (
        run_folder(name, seed, 1.5, exported=1.5, problems=("no",)) for name, seed in (("b", 7), ("c", 8))
    )
    (damaged / "golf" / "ledger.json").write_text("{")
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "empty.json").write_text('{"bpb": 1.5, "tokens": 0, "bytes": 0}')
    (tmp_path / "doctored.json").write_text('{"bpb": 1.5, "tokens": 9, "bytes": 9, "problems": ["of another text"]}')
    two = ("--runs", first, second)
    bad = [
        (("--runs", first), "1 seed has no deviation"),
        (("--runs", *files("score", [1.5, 1.5])), "all 2 scores are 1.5: that is one run named several times, or"),
        (("--runs", first, first), "named twice"),
        ((*two, twin), "same config and seed"),
        ((*two, wider), "first, wider differ in more than the seed"),
        (("--runs", first, other_text), "different texts"),
        (("--runs", first, exported[0]), "first has no golf export"),
        (("--runs", exported[1], failed), "b does not count: no"),
        (("--runs", exported[1], damaged), "ledger.json is damaged"),
        (("--runs", first, tmp_path / "none"), "neither the folder of a run nor"),
        (("--runs", first, tmp_path / "bad.json"), "neither the folder of a run nor"),
        (("--runs", first, tmp_path / "empty.json"), "empty.json says that 0 tokens of 0 bytes were scored; score a"),
        (("--runs", first, tmp_path / "doctored.json"), "doctored.json scored does not count: of another text"),
        ((*two, "--leave_out", "third=why"), "there is no run third"),
        ((*two, "--leave_out", "first (seed 1)= "), "has no reason; write it as RUN=REASON"),
        ((*two, "--leave_out", "first"), "has no reason; write it as RUN=REASON"),
    ]
    for arguments, says in [((*arguments, "--reference", 1.6), says) for arguments, says in bad] + [
        ((*two, "--reference_runs", other_text), "scored on another text"),
        ((*two, "--reference_runs", first, first), "error: --reference_runs: a run is named twice"),
        ((*two, "--reference_runs", tmp_path / "bad.json"), "error: --reference_runs: "),
        (two, "is required"),
    ]:
        status, printed, error = record(*arguments)
        assert (status, printed) == (2, ""), arguments
        assert error.startswith("error: ") and error.count("\n") == 1 and says in error, error
