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
from hfgolf.system.errors import UserError

TOKENS, BYTES = 62_021_632, 151_078_221  # the challenge's validation split with 1,024 entries
SEQ_2048 = [1.20576485, 1.2061746, 1.20715923]
SEQ_4096 = [1.20143417, 1.19945102, 1.20319508]
RECORD_549 = [1.11922988, 1.12002032, 1.11888882]
RECORD_1019 = [1.11508120, 1.11437394, 1.11475014]


def as_scores(values: list[float]) -> list[Score]:
    return [Score(f"seed {number}", value) for number, value in enumerate(values, 1)]


def test_published_2048_context_record():
    test = welch_test(SEQ_2048, [1.21937], margin=0.0, significance=0.01)
    assert (f"{test.t:.2f}", f"{test.p:.5f}", test.degrees_of_freedom) == ("31.43", "0.00051", 2)
    published = welch_test(SEQ_2048, [1.22436570 - 0.005], margin=0.0, significance=0.01)  # 1.21937, not yet rounded
    assert (f"{published.t:.2f}", f"{published.p:.5f}") == ("31.42", "0.00051")


def test_published_4096_context_record():
    test = welch_test(SEQ_4096, [1.21613611], margin=0.005, significance=0.01)
    assert (f"{test.p:.3f}", f"{test.sd:.5f}", f"{test.mean:.8f}") == ("0.006", "0.00187", "1.20136009")
    assert f"{test.t:.2f}" == "9.04"
    assert f"{test.lead / (0.00187 / math.sqrt(3)):.2f}" == "9.05"  # 9.06 was printed, from a rounded deviation


def test_published_record_1019_against_record_549():
    test = welch_test(RECORD_1019, RECORD_549, margin=0.0, significance=0.01)
    assert (f"{test.t:.4f}", f"{test.degrees_of_freedom:.4f}") == ("11.8339", "3.3063")
    assert test.mean == pytest.approx(1.11473509, abs=1e-8)
    assert test.reference == pytest.approx(1.11937967, abs=1e-8)
    claim = judge(
        as_scores(RECORD_1019),
        as_scores(RECORD_549),
        margin_nats=0.0,
        significance=0.01,
        tokens_per_byte=TOKENS / BYTES,
    )
    nats = claim.figures()["nats_per_token"]
    assert nats["lead"] == pytest.approx(0.00784215, rel=1e-4)
    assert nats["mean"] == pytest.approx(1.88217853, rel=1e-4)


def test_margin_is_in_nats_per_token():
    """0.005 nats per token are 0.0030 bits per byte with 1,024 entries and 0.0019 with 8,192."""
    for tokens, bits in ((TOKENS, 0.0030), (40_540_160, 0.0019), (47_851_520, 0.0023)):
        claim = judge(
            as_scores([1.0, 1.1]),
            [Score("r", 1.2)],
            margin_nats=0.005,
            significance=0.01,
            tokens_per_byte=tokens / BYTES,
        )
        assert claim.test.margin == pytest.approx(bits, abs=6e-5)
        assert claim.figures()["nats_per_token"]["margin"] == pytest.approx(0.005)


def test_lead_needed_with_three_seeds():
    """t above 6.96; at a deviation of 0.0014 nats a lead of 0.0056 nats."""
    values = [1 - 0.0014, 1.0, 1 + 0.0014]
    assert statistics.stdev(values) == pytest.approx(0.0014)
    at_limit = 6.9646 * 0.0014 / math.sqrt(3)
    assert at_limit == pytest.approx(0.0056, abs=5e-5)
    for lead, is_enough in ((at_limit * 1.001, True), (at_limit * 0.999, False)):
        test = welch_test(values, [1 + lead], 0.0, 0.01)
        assert test.needed_t == pytest.approx(6.9646, abs=1e-4)
        assert (test.p < 0.01) is is_enough
        assert test.needed_seeds == (3 if is_enough else 4)


@pytest.mark.parametrize("reference", [[1.001], [1.0015, 1.0021, 1.0018]])
def test_needed_seeds_are_the_fewest_that_suffice(reference):
    random = np.random.default_rng(0)

    def sample(seeds: int) -> list[float]:
        """Return seeds with exactly this mean and deviation."""
        values = random.normal(size=seeds)
        values = (values - values.mean()) / values.std(ddof=1)
        return (1 + 0.0014 * values).tolist()

    needed = welch_test(sample(3), reference, 0.0, 0.01).needed_seeds
    assert needed is not None and needed > 3
    assert welch_test(sample(needed), reference, 0.0, 0.01).p < 0.01
    assert welch_test(sample(needed - 1), reference, 0.0, 0.01).p >= 0.01


def test_no_number_of_seeds_proves_a_negative_lead():
    test = welch_test([1.0, 1.1], [1.0], 0.0, 0.01)
    assert test.p > 0.5 and test.needed_seeds is None
    same = welch_test([1.0, 1.0], [1.5], 0.0, 0.01)
    assert (same.t, same.p) == (math.inf, 0.0)


@pytest.fixture
def record(run_script) -> Any:
    """Run the script and return (exit status, stdout, stderr)."""
    return partial(run_script, "golf_record.py")


def test_script_decides_whether_a_record_holds(record):
    sizes = ("--tokens", TOKENS, "--bytes", BYTES)
    status, printed, error = record("--scores", *SEQ_2048, "--reference", 1.2243657, *sizes)
    assert (status, error) == (0, "")
    rows = printed.splitlines()
    assert rows[1].split() == ["seed", "1", "2.03585", "1.20576", "-", "-"]
    assert "margin                       0.00500        0.00296" in rows
    assert rows[-2].startswith("one-sided t 36.") and rows[-1].startswith("Better than the reference by more than")
    status, printed, _ = record("--scores", *SEQ_2048, "--reference", 1.212, *sizes)
    assert status == 1 and printed.splitlines()[-1] == (
        "Not significant with 3 seeds; at this mean and this deviation it would be with 4 seeds."
    )
    status, printed, _ = record("--scores", *SEQ_2048, "--reference_scores", *SEQ_4096, *sizes, "--json")
    figures = json.loads(printed)
    assert status == 1 and not figures["holds"] and figures["bits_per_byte"]["lead"] < 0
    assert [score["bits_per_byte"] for score in figures["references"]] == SEQ_4096


def test_excluding_a_seed_needs_a_reason_and_prints_it(record):
    arguments = ("--scores", *SEQ_2048, "--reference", 1.22, "--margin_nats", 0)
    status, printed, _ = record(*arguments, "--leave_out", "seed 3=its disk was full")
    assert status == 0 and "left out: seed 3, because its disk was full" in printed
    assert "1.20716" not in printed


@pytest.fixture
def run_folder(tmp_path):
    """Return a function that writes what golf_record reads of a finished run."""

    def write(name: str, seed: int, bits: float, width: int = 64, num_bytes: int = 4000) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        loss = bits * math.log(2) * num_bytes / 1000
        row = {
            "step": 10, "elapsed_seconds": 9.0, "data_seconds": 0.0, "compute_seconds": 8.0,
            "train_losses": [loss] * 10, "val_loss": loss, "val_tokens": 1000, "val_bytes": num_bytes,
        }  # fmt: skip
        summary = {
            "weights": "raw", "val_loss": loss, "val_bits_per_byte": bits, "val_tokens": 1000, "val_bytes": num_bytes,
            "train_seconds": 12.0,
        }  # fmt: skip
        metadata = {
            "seed": seed, "config": {"run.seed": seed, "model.hidden_size": width}, "sources": {}, "environment": {},
            "hardware": {}, "packages": {}, "commit": None,
        }  # fmt: skip
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metadata.json").write_text(json.dumps(metadata))
        return folder

    return write


def test_runs_are_read_with_their_validation_text_and_seconds(run_folder, record):
    runs = [run_folder(f"run-seed{seed}", seed, 1.5 + seed / 1000) for seed in (1, 2, 3)]
    status, printed, _ = record("--runs", *runs, "--reference", 1.6, "--json")
    figures = json.loads(printed)
    assert status == 0
    assert [score["name"] for score in figures["scores"]] == [f"run-seed{seed} (seed {seed})" for seed in (1, 2, 3)]
    assert figures["bits_per_byte"]["mean"] == pytest.approx(1.502)
    assert figures["bits_per_byte"]["margin"] == pytest.approx(0.005 / math.log(2) * 1000 / 4000)
    assert figures["scores"][0]["seconds"] == 12.0


def export(run: Path, bits: float, problems: tuple[str, ...] = ()) -> Path:
    """Write what golf_record reads of a run's golf export."""
    after = {"bpb": bits, "tokens": 1000, "bytes": 4000}
    ledger = {"after": after, "problems": problems, "count": "challenge", "totals": {"challenge": 499_000}}
    (run / "golf").mkdir()
    (run / "golf" / "ledger.json").write_text(json.dumps(ledger))
    return run


def test_exported_run_is_scored_from_its_files(run_folder, record):
    runs = [export(run_folder(f"run-seed{seed}", seed, 1.5), 1.52 + seed / 1000) for seed in (1, 2)]
    status, printed, _ = record("--runs", *runs, "--reference", 1.6, "--json")
    figures = json.loads(printed)
    assert status == 0 and figures["bits_per_byte"]["mean"] == pytest.approx(1.5215)
    assert [score["artifact_bytes"] for score in figures["scores"]] == [499_000, 499_000]
    _, printed, _ = record("--runs", *runs, "--reference", 1.6)
    assert "499,000" in printed


def test_reads_the_output_of_the_scoring_programs(tmp_path, record):
    (tmp_path / "a.json").write_text('{"nats": 9.0, "tokens": 1000, "bytes": 4000, "bpb": 1.5, "sha256": "..."}')
    (tmp_path / "b.json").write_text('{"num_tokens": 1000, "num_bytes": 4000, "bits_per_byte": 1.501}')
    status, printed, _ = record("--runs", tmp_path / "a.json", tmp_path / "b.json", "--reference", 1.6)
    assert status == 0 and "1.50050" in printed


def test_invalid_submission_is_one_line(run_folder, record, tmp_path):
    first, second = run_folder("first", 1, 1.5), run_folder("second", 2, 1.51)
    twin, wider = run_folder("twin", 2, 1.51), run_folder("wider", 3, 1.4, width=128)
    other_text = run_folder("other_text", 4, 1.5, num_bytes=5000)
    (tmp_path / "bad.json").write_text("[]")
    failed = export(run_folder("b", 7, 1.5), 1.5, ("no",))
    bad = [
        (("--runs", first, "--reference", 1.6), "1 seed has no deviation"),
        (("--runs", first, first, "--reference", 1.6), "named twice"),
        (("--runs", first, second, twin, "--reference", 1.6), "same config and seed"),
        (("--runs", first, second, wider, "--reference", 1.6), "first, wider differ in more than the seed"),
        (("--runs", first, other_text, "--reference", 1.6), "different texts"),
        (("--runs", first, second, "--reference_runs", other_text), "scored on another text"),
        (
            ("--runs", first, export(run_folder("exported", 5, 1.5), 1.5), "--reference", 1.6),
            "first has no golf export",
        ),
        (
            ("--reference", 1.6, "--runs", export(run_folder("a", 6, 1.5), 1.5), failed),
            "b does not count: no",
        ),
        (("--runs", first, tmp_path / "none", "--reference", 1.6), "neither the folder of a run nor"),
        (("--runs", first, tmp_path / "bad.json", "--reference", 1.6), "neither the folder of a run nor"),
        (("--runs", first, second, "--reference", 1.6, "--leave_out", "third=why"), "there is no run third"),
        (("--runs", first, second, "--reference", 1.6, "--leave_out", "first (seed 1)="), "needs a reason"),
        (
            ("--runs", first, second, "--reference", 1.6, "--leave_out", "first"),
            "has no reason; write it as RUN=REASON",
        ),
        (("--scores", 1.5, 1.6, "--reference", 1.6), "--margin_nats 0"),
        (("--scores", 1.5, 1.6, "--reference", 1.6, "--tokens", 5), "go together"),
        (("--runs", first, second, "--reference", 1.6, "--tokens", 5, "--bytes", 9), "are for --scores"),
        (("--runs", first, second), "is required"),
    ]
    for arguments, says in bad:
        status, printed, error = record(*arguments)
        assert (status, printed) == (2, ""), arguments
        assert error.startswith("error: ") and error.count("\n") == 1 and says in error, error


def test_excluding_a_seed_from_python_needs_a_reason():
    with pytest.raises(UserError, match="needs a reason"):
        judge(as_scores([1.0, 1.1]), [Score("r", 2.0)], margin_nats=0, significance=0.01, left_out={"seed 1": " "})
