"""Is a record real? hfgolf golf record --runs runs/a runs/b runs/c --reference 1.0611

Prints each seed, their mean and deviation, and a one-sided test that the mean beats the reference by the margin
(Welch's if the reference has seeds of its own). Exit status 0: it does. 1: it does not, or not yet; then the seeds that
it would take. Parameter Golf asked for 0.005 nats per token at p < 0.01.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfgolf.commands.options import ScriptParser, bounded
from hfgolf.run.folder import RunFolder
from hfgolf.system.errors import UserError
from hfgolf.system.wording import duration

_MOST_SEEDS = 1000


def main() -> int:
    parser = ScriptParser(__doc__)
    own = parser.add_mutually_exclusive_group(required=True)
    own.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        help="folders of runs, or JSON files that score.py or `hfgolf evaluate --json` printed",
    )
    own.add_argument("--scores", nargs="+", **bounded(0.0, 100.0, "bits per byte of each seed"))
    known = parser.add_mutually_exclusive_group(required=True)
    known.add_argument("--reference", **bounded(0.0, 100.0, "bits per byte to beat, one number"))
    known.add_argument("--reference_runs", nargs="+", type=Path, help="the runs to beat")
    known.add_argument("--reference_scores", nargs="+", **bounded(0.0, 100.0, "bits per byte of their seeds"))
    parser.add_argument("--margin_nats", **bounded(0.0, 10.0, "nats per token to beat the reference by", 0.005))
    parser.add_argument("--tokens", **bounded(1, 10**15, "scored tokens, for --scores"))
    parser.add_argument("--bytes", **bounded(1, 10**15, "bytes of the scored text, for --scores"))
    parser.add_argument("--significance", **bounded(1e-9, 0.5, "the p-value to be below", 0.01))
    parser.add_argument(
        "--leave_out",
        action="append",
        default=[],
        metavar="RUN=REASON",
        help="a run that does not count, and why; both are printed. All other runs count",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    if (arguments.tokens is None) != (arguments.bytes is None):
        parser.error("--tokens and --bytes go together")
    if arguments.runs and arguments.tokens:
        parser.error("--tokens and --bytes are for --scores; runs say how much text was scored")

    def scores(paths: list[Path] | None, numbers: list[float] | None) -> list[Score]:
        if paths:
            return read_scores(paths)
        return [Score(f"seed {number}", bits) for number, bits in enumerate(numbers or [], start=1)]

    left_out = {}
    for text in arguments.leave_out:
        name, separator, reason = text.partition("=")
        if not separator:
            raise UserError(f"--leave_out: {text!r} has no reason; write it as RUN=REASON.")
        left_out[name] = reason
    reference = arguments.reference_scores if arguments.reference is None else [arguments.reference]
    claim = judge(
        scores(arguments.runs, arguments.scores),
        scores(arguments.reference_runs, reference),
        margin_nats=arguments.margin_nats,
        significance=arguments.significance,
        tokens_per_byte=arguments.tokens / arguments.bytes if arguments.tokens else None,
        left_out=left_out,
    )
    print(json.dumps(claim.figures()) if arguments.json else claim.table())
    return 0 if claim.holds else 1


@dataclass(frozen=True)
class Score:
    """The score of one seed. num_tokens and num_bytes: of the text that was scored; None if only a number was given."""

    name: str
    bits_per_byte: float
    num_tokens: int | None = None
    num_bytes: int | None = None
    artifact_bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class TTest:
    """A one-sided t-test that a mean is below a reference minus a margin, all in one unit."""

    mean: float
    sd: float
    reference: float
    reference_sd: float | None
    margin: float
    t: float
    degrees_of_freedom: float
    p: float
    needed_t: float
    """The smallest t that is significant with these degrees of freedom."""
    needed_seeds: int | None
    """The fewest seeds for which this mean and this deviation would be significant; None if more than 1,000."""

    @property
    def lead(self) -> float:
        """How far the mean is below the reference minus the margin."""
        return self.reference - self.margin - self.mean


def welch_test(scores: Sequence[float], reference: Sequence[float], margin: float, significance: float) -> TTest:
    """Test whether the mean of scores is below the reference's mean minus a margin (Welch 1947, Biometrika 34).

    reference: the scores of its seeds, or one number without a deviation, which makes it a one-sample test.

    Raises UserError for fewer than two scores.
    """
    from hfgolf.compare.statistics import stats  # late: scipy takes a second

    if len(scores) < 2:
        raise UserError(f"{len(scores)} seed has no deviation; give the runs of at least two seeds, better five.")
    mean, sd = statistics.mean(scores), statistics.stdev(scores)
    known = statistics.mean(reference)
    known_sd = statistics.stdev(reference) if len(reference) > 1 else None
    lead = known - margin - mean
    t, degrees_of_freedom = _welch(lead, sd, len(scores), known_sd, len(reference))
    needed = None
    for seeds in range(2, _MOST_SEEDS + 1):
        if stats.t.sf(*_welch(lead, sd, seeds, known_sd, len(reference))) < significance:
            needed = seeds
            break
    return TTest(
        mean=mean,
        sd=sd,
        reference=known,
        reference_sd=known_sd,
        margin=margin,
        t=t,
        degrees_of_freedom=degrees_of_freedom,
        p=float(stats.t.sf(t, degrees_of_freedom)),
        needed_t=float(stats.t.isf(significance, degrees_of_freedom)),
        needed_seeds=needed,
    )


def _welch(lead: float, sd: float, seeds: int, known_sd: float | None, known_seeds: int) -> tuple[float, float]:
    """Return (t, degrees of freedom) for a lead, by the Welch-Satterthwaite equation."""
    own, known = sd**2 / seeds, (known_sd or 0.0) ** 2 / known_seeds
    if own + known == 0:
        return math.copysign(math.inf, lead) if lead else 0.0, seeds - 1
    squares = own**2 / (seeds - 1) + (known**2 / (known_seeds - 1) if known_sd else 0.0)
    return lead / math.sqrt(own + known), (own + known) ** 2 / squares


@dataclass(frozen=True)
class Claim:
    """A test of all seeds, and what it was made of."""

    scores: tuple[Score, ...]
    references: tuple[Score, ...]
    test: TTest
    """In bits per byte."""
    tokens_per_byte: float | None
    """Of the scored text; None if it is not known, and then nothing is known in nats per token."""
    significance: float
    left_out: Mapping[str, str]
    """{name of a run: why it does not count}."""

    @property
    def holds(self) -> bool:
        return self.test.p < self.significance

    def nats_per_token(self, bits_per_byte: float | None) -> float | None:
        """Convert bits per byte; a difference converts in the same way."""
        if bits_per_byte is None or self.tokens_per_byte is None:
            return None
        return bits_per_byte * math.log(2) / self.tokens_per_byte

    def figures(self) -> dict[str, Any]:
        """Return everything for --json; each difference in both units."""
        test = self.test
        in_bits = {name: getattr(test, name) for name in ("mean", "sd", "reference", "reference_sd", "margin", "lead")}
        return {
            "holds": self.holds,
            "scores": [vars(score) for score in self.scores],
            "references": [vars(score) for score in self.references],
            "left_out": dict(self.left_out),
            "bits_per_byte": in_bits,
            "nats_per_token": {name: self.nats_per_token(value) for name, value in in_bits.items()},
            "t": test.t,
            "degrees_of_freedom": test.degrees_of_freedom,
            "p": test.p,
            "significance": self.significance,
            "needed_t": test.needed_t,
            "needed_seeds": test.needed_seeds,
        }

    def table(self) -> str:
        """Return the claim for a person."""
        lines = [f"{'run':<24}{'nats/token':>12}{'bits per byte':>15}{'bytes':>13}{'time':>12}"]
        for score in (*self.scores, *self.references):
            size = "-" if score.artifact_bytes is None else f"{score.artifact_bytes:,}"
            time = "-" if score.seconds is None else duration(score.seconds)
            name = score.name if score in self.scores else f"reference {score.name}"
            lines.append(f"{name:<24}{self._both(score.bits_per_byte)}{size:>13}{time:>12}")
        test = self.test
        for name, value in (("mean", test.mean), ("deviation (n - 1)", test.sd), ("reference", test.reference)):
            lines.append(f"{name:<24}{self._both(value)}")
        lines += [f"{'margin':<24}{self._both(test.margin)}", f"{'lead beyond the margin':<24}{self._both(test.lead)}"]
        lines += [f"left out: {name}, because {reason}" for name, reason in self.left_out.items()]
        lines.append(
            f"one-sided t {test.t:.2f} with {test.degrees_of_freedom:.2f} degrees of freedom, p {_p_value(test.p)};"
            f" p < {self.significance:g} needs t > {test.needed_t:.2f}"
        )
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        test, seeds = self.test, len(self.scores)
        if self.holds:
            return f"Better than the reference by more than the margin, at p < {self.significance:g} ({seeds} seeds)."
        if test.lead <= 0:
            return "Not better than the reference by the margin; more seeds of the same runs would not change that."
        needed = f"{test.needed_seeds}" if test.needed_seeds else f"more than {_MOST_SEEDS:,}"
        return f"Not significant with {seeds} seeds; at this mean and this deviation it would be with {needed} seeds."

    def _both(self, bits_per_byte: float) -> str:
        nats = self.nats_per_token(bits_per_byte)
        return f"{'-' if nats is None else f'{nats:.5f}':>12}{bits_per_byte:>15.5f}"


def _p_value(p: float) -> str:
    return f"{p:.2g}" if p >= 1e-12 else "< 1e-12"


def judge(
    scores: Sequence[Score],
    references: Sequence[Score],
    *,
    margin_nats: float,
    significance: float,
    tokens_per_byte: float | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Claim:
    """Judge whether runs beat a reference by margin_nats nats per token; all scores enter but those left out.

    tokens_per_byte: of the scored text, if the scores don't say it. left_out: {name: reason}.

    Raises UserError if a score was left out without a reason or does not exist, scores are of different texts, or the
    margin can't be converted to bits per byte.
    """
    left_out = dict(left_out or {})
    for name, reason in left_out.items():
        if name not in {score.name for score in scores}:
            raise UserError(f"--leave_out: there is no run {name}; the runs are {', '.join(s.name for s in scores)}.")
        if not reason.strip():
            raise UserError(
                f"--leave_out: {name} needs a reason, which is printed: --leave_out {name}='the disk failed'."
            )
    texts = {(score.num_tokens, score.num_bytes) for score in scores if score.num_tokens}
    if len(texts) > 1:
        raise UserError(
            f"--runs: the runs were scored on different texts ({_texts(texts)}); evaluate them on one text."
        )
    reference_bytes = {score.num_bytes for score in references if score.num_bytes}
    if texts and reference_bytes - {num_bytes for _, num_bytes in texts}:
        raise UserError("--reference_runs: they were scored on another text; evaluate all runs on one text.")
    if texts:
        ((num_tokens, num_bytes),) = texts
        assert num_tokens is not None and num_bytes is not None
        tokens_per_byte = num_tokens / num_bytes
    if tokens_per_byte is None and margin_nats:
        raise UserError(
            "--margin_nats: nats per token are bits per byte only with --tokens and --bytes of the scored text;"
            " give them, or --margin_nats 0."
        )
    margin = margin_nats / math.log(2) * tokens_per_byte if tokens_per_byte else 0.0
    counted = tuple(score for score in scores if score.name not in left_out)
    values, known = ([score.bits_per_byte for score in group] for group in (counted, references))
    test = welch_test(values, known, margin, significance)
    return Claim(counted, tuple(references), test, tokens_per_byte, significance, left_out)


def _texts(texts: Collection[tuple[int, int | None]]) -> str:
    return " and ".join(sorted(f"{tokens:,} tokens of {num_bytes:,} bytes" for tokens, num_bytes in texts))


def read_scores(paths: Sequence[Path]) -> list[Score]:
    """Read the scores of runs of one configuration, one per seed, each from a run's folder or from a JSON file.

    The score of a run is that of its golf export (RUN/golf), if it has one; otherwise that of its model. A JSON file is
    what score.py or `hfgolf evaluate --json` printed.

    Raises UserError for anything else, for a path or a seed that comes twice, for runs whose configs differ in more
    than the seed, for exports with problems, and if only some of the runs were exported.
    """
    from hfgolf.compare.outcome import group_by_arm, read_outcome  # late: it imports torch

    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("--runs: a run is named twice; each seed counts once.")
    folders = [path for path in paths if path.is_dir()]
    arms = group_by_arm([read_outcome(RunFolder(path)) for path in folders])
    if len(arms) > 1:
        raise UserError(f"--runs: {', '.join(arms)} differ in more than the seed; they are not one submission.")
    missing = [path for path in folders if not _ledger(path).is_file()]
    if missing and len(missing) < len(folders):
        raise UserError(
            f"--runs: {missing[0]} has no golf export, others have; run `hfgolf golf export` for all, or for none."
        )
    return [_run_score(path) if path.is_dir() else _file_score(path) for path in paths]


def _ledger(run: Path) -> Path:
    from hfgolf.golf.rescore import LEDGER  # late: it imports torch

    return run / "golf" / LEDGER


def _run_score(path: Path) -> Score:
    from hfgolf.compare.outcome import read_outcome

    outcome = read_outcome(RunFolder(path))
    name, seconds = f"{path.name} (seed {outcome.seed})", outcome.summary.get("train_seconds")
    if not _ledger(path).is_file():
        tokens, num_bytes = outcome.summary["val_tokens"], outcome.summary["val_bytes"]
        return Score(name, outcome.summary["val_bits_per_byte"], tokens, num_bytes, seconds=seconds)
    try:
        figures = json.loads(_ledger(path).read_text("utf-8"))
        after, problems = figures["after"], figures["problems"]
        counted = figures["totals"][figures["count"]]
        score = Score(name, after["bpb"], after["tokens"], after["bytes"], counted, seconds)
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--runs: {_ledger(path)} is damaged; run `hfgolf golf export` again.") from None
    if problems:
        raise UserError(f"--runs: the export of {path} does not count: {problems[0]}")
    return score


def _file_score(path: Path) -> Score:
    try:
        figures = json.loads(path.read_text("utf-8"))
        num_tokens = int(figures.get("tokens", figures.get("num_tokens")))
        num_bytes = int(figures.get("bytes", figures.get("num_bytes")))
        bits = float(figures.get("bpb", figures.get("bits_per_byte")))
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(
            f"--runs: {path} is neither the folder of a run nor a JSON file with bits_per_byte, num_tokens and"
            " num_bytes."
        ) from None
    return Score(path.stem, bits, num_tokens, num_bytes)
