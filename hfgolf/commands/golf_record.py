"""Is a record real? hfgolf golf record --runs runs/a runs/b runs/c --reference 1.0611

Prints each seed, their mean and deviation, and a one-sided test that the mean beats the reference by the margin
(Welch's if the reference has seeds of its own). Exit status 0: it does. 1: it does not, or not yet; then the seeds that
it would take. Parameter Golf asked for 0.005 nats per token at p < 0.01.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfgolf.commands.options import Answer, ScriptParser, bounded
from hfgolf.run.folder import RunFolder
from hfgolf.run.record import read_json
from hfgolf.system.errors import UserError
from hfgolf.system.wording import duration

_MOST_SEEDS = 1000


def main() -> Answer:
    parser = ScriptParser(__doc__)
    parser.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        required=True,
        help="folders of runs, or JSON files that score.py, or `hfgolf golf score` or `evaluate` with --json, printed",
    )
    known = parser.add_mutually_exclusive_group(required=True)
    known.add_argument("--reference", nargs="+", **bounded(0.0, 100.0, "bits per byte to beat, of one seed or more"))
    known.add_argument("--reference_runs", nargs="+", type=Path, help="the runs to beat")
    parser.add_argument("--margin_nats", **bounded(0.0, 10.0, "nats per token to beat the reference by", 0.005))
    parser.add_argument("--significance", **bounded(1e-9, 0.5, "the p-value to be below", 0.01))
    parser.add_argument(
        "--leave_out",
        action="append",
        default=[],
        metavar="RUN=REASON",
        help="a run that does not count, and why; both are printed. All other runs count",
    )
    arguments = parser.parse_args()
    left_out = {}
    for text in arguments.leave_out:
        name, _, reason = text.partition("=")
        if not reason.strip():
            raise UserError(f"--leave_out: {text!r} has no reason; write it as RUN=REASON.")
        left_out[name] = reason
    scores = read_scores("--runs", arguments.runs)
    if arguments.reference_runs:
        references = read_scores("--reference_runs", arguments.reference_runs)
    else:
        references = [Score(f"seed {seed}", bits) for seed, bits in enumerate(arguments.reference, 1)]
    margin, significance = arguments.margin_nats, arguments.significance
    figures = judge(scores, references, margin_nats=margin, significance=significance, left_out=left_out)
    return Answer(figures, _table(figures), status=int(not figures["holds"]))


@dataclass(frozen=True)
class Score:
    """The score of one seed. num_tokens and num_bytes: of the text that was scored; None if only a number was given."""

    name: str
    bits_per_byte: float
    num_tokens: int | None = None
    num_bytes: int | None = None
    artifact_bytes: int | None = None
    seconds: float | None = None


def welch_test(
    scores: Sequence[float], reference: Sequence[float], margin: float, significance: float
) -> dict[str, Any]:
    """Test whether the mean of scores is below the reference's mean minus a margin (Welch 1947, Biometrika 34).

    reference: the scores of its seeds, or one number without a deviation, which makes it a one-sample test.

    p is one-sided; needed_t is the smallest t that is significant; needed_seeds are the fewest for which this mean and
    deviation are, None if more than 1,000; lead is how far the mean is below the reference minus the margin. Raises
    UserError for fewer than two scores, and if all are equal.
    """
    from hfgolf.compare.statistics import stats  # late: scipy takes a second

    if len(scores) < 2:
        raise UserError(f"{len(scores)} seed has no deviation; give the runs of at least two seeds, better five.")
    mean, sd, known = statistics.mean(scores), statistics.stdev(scores), statistics.mean(reference)
    if sd == 0:
        raise UserError(f"all {len(scores)} scores are {mean}: that is one run named several times, or too few digits.")
    known_sd = statistics.stdev(reference) if len(reference) > 1 else None
    lead = known - margin - mean

    def student(seeds: int) -> tuple[float, float]:
        """Return (t, degrees of freedom) by the Welch-Satterthwaite equation."""
        own, other = sd**2 / seeds, (known_sd or 0.0) ** 2 / len(reference)
        squares = own**2 / (seeds - 1) + (other**2 / (len(reference) - 1) if other else 0.0)
        return lead / math.sqrt(own + other), (own + other) ** 2 / squares

    t, degrees_of_freedom = student(len(scores))
    enough = (seeds for seeds in range(2, _MOST_SEEDS + 1) if stats.t.sf(*student(seeds)) < significance)
    return {
        **{"mean": mean, "sd": sd, "reference": known, "reference_sd": known_sd, "margin": margin, "lead": lead},
        "t": t,
        "degrees_of_freedom": degrees_of_freedom,
        "p": float(stats.t.sf(t, degrees_of_freedom)),
        "needed_t": float(stats.t.isf(significance, degrees_of_freedom)),
        "needed_seeds": next(enough, None),
    }


def judge(
    scores: Sequence[Score],
    references: Sequence[Score],
    *,
    margin_nats: float,
    significance: float,
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """Judge whether runs beat a reference by margin_nats nats per token; return the figures that --json prints.

    scores: of one text, whose tokens and bytes they know. All enter but those left out. left_out: {name: reason}.
    Differences are in bits per byte and in nats per token.

    Raises UserError if a score to leave out does not exist, or scores are of different texts.
    """
    for name in left_out.keys() - {score.name for score in scores}:
        raise UserError(f"--leave_out: there is no run {name}; the runs are {', '.join(s.name for s in scores)}.")
    texts = {(score.num_tokens, score.num_bytes) for score in scores}
    if len(texts) > 1:
        each = " and ".join(sorted(f"{tokens:,} tokens of {num_bytes:,} bytes" for tokens, num_bytes in texts))
        raise UserError(f"--runs: the runs were scored on different texts ({each}); evaluate them on one text.")
    ((num_tokens, num_bytes),) = texts
    assert num_tokens and num_bytes, "runs and files say them"
    if {score.num_bytes for score in references} - {num_bytes, None}:
        raise UserError("--reference_runs: they were scored on another text; evaluate all runs on one text.")
    nats_per_bit = math.log(2) * num_bytes / num_tokens  # of a token, for a bit per byte
    counted = [score for score in scores if score.name not in left_out]
    bits, of_reference = ([score.bits_per_byte for score in part] for part in (counted, references))
    test = welch_test(bits, of_reference, margin_nats / nats_per_bit, significance)

    def with_nats(score: Score) -> dict[str, Any]:
        return asdict(score) | {"nats_per_token": nats_per_bit * score.bits_per_byte}

    in_bits = {name: test.pop(name) for name in ("mean", "sd", "reference", "reference_sd", "margin", "lead")}
    return {
        "holds": test["p"] < significance,
        "scores": [with_nats(score) for score in counted],
        "references": [with_nats(score) for score in references],
        "left_out": left_out,
        "bits_per_byte": in_bits,
        "nats_per_token": {name: bits and nats_per_bit * bits for name, bits in in_bits.items()},
        "significance": significance,
        **test,
    }


def _table(figures: Mapping[str, Any]) -> str:
    """Return the figures for a person, with the verdict in the last line."""

    def row(name: str, nats: float, bits: float, *more: str) -> str:
        cells = [f"{nats:.5f}", f"{bits:.5f}", *more]
        return f"{name:<24}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, (12, 15, 13, 12), strict=False))

    lines = [f"{'run':<24}{'nats/token':>12}{'bits per byte':>15}{'bytes':>13}{'time':>12}"]
    for of, group in (("", figures["scores"]), ("reference ", figures["references"])):
        for score in group:
            size = "-" if score["artifact_bytes"] is None else f"{score['artifact_bytes']:,}"
            time = "-" if score["seconds"] is None else duration(score["seconds"])
            lines.append(row(of + score["name"], score["nats_per_token"], score["bits_per_byte"], size, time))
    names = {"mean": "mean", "sd": "deviation (n - 1)", "reference": "reference", "margin": "margin"}
    for key, name in (names | {"lead": "lead beyond the margin"}).items():
        lines.append(row(name, figures["nats_per_token"][key], figures["bits_per_byte"][key]))
    lines += [f"left out: {name}, because {reason}" for name, reason in figures["left_out"].items()]
    p, level, seeds = figures["p"], figures["significance"], len(figures["scores"])
    lines.append(
        f"one-sided t {figures['t']:.2f} with {figures['degrees_of_freedom']:.2f} degrees of freedom, p"
        f" {f'{p:.2g}' if p >= 1e-12 else '< 1e-12'}; p < {level:g} needs t > {figures['needed_t']:.2f}"
    )
    if figures["holds"]:
        verdict = f"Better than the reference by more than the margin, at p < {level:g} ({seeds} seeds)."
    elif figures["bits_per_byte"]["lead"] <= 0:
        verdict = "Not better than the reference by the margin; more seeds of the same runs would not change that."
    else:
        needed = figures["needed_seeds"] or f"more than {_MOST_SEEDS:,}"
        verdict = (
            f"Not significant with {seeds} seeds; at this mean and this deviation it would be with {needed} seeds."
        )
    return "\n".join([*lines, verdict])


def read_scores(option: str, paths: Sequence[Path]) -> list[Score]:
    """Read the scores of runs of one configuration, one per seed, each from a run's folder or from a JSON file.

    option: what named them, for messages.

    The score of a run is that of its golf export (RUN/golf), if it has one; otherwise that of its model. A JSON file is
    what score.py, or `hfgolf golf score` or `hfgolf evaluate` with --json, printed.

    Raises UserError for anything else, for a path or a seed that comes twice, for runs whose configs differ in more
    than the seed, for exports with problems, for scores of no text, and if only some of the runs were exported.
    """
    from hfgolf.compare.outcome import group_by_arm, read_outcome  # late: it imports torch

    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"{option}: a run is named twice; each seed counts once.")
    outcomes = {path: read_outcome(RunFolder(path)) for path in paths if path.is_dir()}
    arms = group_by_arm(list(outcomes.values()))
    if len(arms) > 1:
        raise UserError(f"{option}: {', '.join(arms)} differ in more than the seed; they are not one submission.")
    missing = [path for path in outcomes if not (path / "golf" / "ledger.json").is_file()]
    if missing and len(missing) < len(outcomes):
        raise UserError(
            f"{option}: {missing[0]} has no golf export, others have; run `hfgolf golf export` for all, or for none."
        )
    scores = [
        _run_score(option, path, outcomes[path], not missing) if path in outcomes else _file_score(option, path)
        for path in paths
    ]
    for path, score in zip(paths, scores, strict=True):
        if not all(isinstance(count, int) and count > 0 for count in (score.num_tokens, score.num_bytes)):
            raise UserError(
                f"{option}: {path} says that {score.num_tokens} tokens of {score.num_bytes} bytes were scored; score a"
                " text with that model again."
            )
    return scores


def _run_score(option: str, path: Path, outcome: Any, is_exported: bool) -> Score:
    name, summary = f"{path.name} (seed {outcome.seed})", outcome.summary
    seconds = summary.get("train_seconds")
    if not is_exported:
        return Score(name, summary["val_bits_per_byte"], summary["val_tokens"], summary["val_bytes"], seconds=seconds)
    figures = read_json(path / "golf" / "ledger.json")
    try:
        after, problems, counted = figures["after"], figures["problems"], figures["totals"][figures["count"]]
        score = Score(name, after["bpb"], after["tokens"], after["bytes"], counted, seconds)
    except (KeyError, TypeError):
        raise UserError(f"{option}: {path}/golf/ledger.json is damaged; run `hfgolf golf export` again.") from None
    if problems:
        raise UserError(f"{option}: the export of {path} does not count: {problems[0]}")
    return score


def _file_score(option: str, path: Path) -> Score:
    figures = read_json(path)
    pairs = (("bpb", "bits_per_byte"), ("tokens", "num_tokens"), ("bytes", "num_bytes"))
    try:
        bits, num_tokens, num_bytes = (figures[short] if short in figures else figures[long] for short, long in pairs)
        score = Score(path.stem, float(bits), int(num_tokens), int(num_bytes), figures.get("counted_bytes"))
    except (KeyError, ValueError, TypeError):
        raise UserError(
            f"{option}: {path} is neither the folder of a run nor a JSON file with bits_per_byte, num_tokens and"
            " num_bytes."
        ) from None
    if problems := figures.get("problems"):
        raise UserError(f"{option}: what {path} scored does not count: {problems[0]}")
    return score
