"""Evaluate an exported model on text files: what hfgolf evaluate does between its options and its table.

Owns the order: options that do not go together, the model, the tokens, the plan, the legality test, the certificate,
the score. The evaluate package does each of them.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import RunConfig, TrainSection
from hfgolf.evaluate.bits_per_byte import Evaluation, bits_per_byte
from hfgolf.evaluate.context import evaluation_length
from hfgolf.evaluate.loss import describe_coverage, evaluate_plan, plan_documents, plan_evaluation
from hfgolf.evaluate.text import tokenize_files
from hfgolf.evaluate.windows import Plan
from hfgolf.golf.certificate import Certificate, certify
from hfgolf.golf.legality import IllegalScorer
from hfgolf.golf.score_first import evaluate_in_order
from hfgolf.measure.memory import evaluation_batch_size
from hfgolf.model.causal_blocks import choose_attention
from hfgolf.publish.load import load_exported
from hfgolf.run.find_model import find_model
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import free_memory_bytes
from hfgolf.system.ranks import decide
from hfgolf.train.decisions import choose_precision


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of hfgolf evaluate, by their names there."""

    model: str
    files: list[str]
    train_files: list[str] | None = None
    text_column: str = "text"
    sequence_length: int | None = None
    batch_size: int | None = None
    """Windows per forward pass; None: what suits the machine."""
    mixed_precision: Any = None  # checked by TrainSection
    evaluation: str = "flat"
    stride: int | None = None
    drop_tail: bool = False
    skip_separators: bool = False
    per_document: bool = False
    adapt_rate: float = 0.0
    check_legality: bool = False
    certify: bool = False

    def __post_init__(self) -> None:
        modes = {"stride": ("sliding", "documents"), "drop_tail": ("flat",), "skip_separators": ("documents",)}
        for option, allowed in modes.items():
            if getattr(self, option) and self.evaluation not in allowed:
                raise UserError(f"--{option} needs --evaluation {' or '.join(allowed)}, but it is {self.evaluation}.")
        in_order = next((name for name in ("adapt_rate", "check_legality") if getattr(self, name)), None)
        if in_order and (self.drop_tail or self.skip_separators):
            raise UserError(f"--{in_order} scores every token: leave out --drop_tail and --skip_separators.")
        others = {name: getattr(self, name) for name in ("stride", "drop_tail", "adapt_rate", "check_legality")}
        others["evaluation"] = self.evaluation != "flat"
        for name in [name for name, is_set in others.items() if self.per_document and is_set]:
            raise UserError(f"--per_document scores each document as lm-eval does: leave out --{name}.")
        if self.train_files and not self.certify:
            raise UserError("--train_files is for --certificate: name its file.")


@dataclass(frozen=True)
class TextEvaluation:
    """A score and what it rests on. `evaluation` is None if it is not legal, or has no certificate.

    problem: what is illegal, or None. legality: what the guard did, if there was one (Reader.describe).
    """

    options: EvaluationOptions
    evaluation: Evaluation | None
    plan: Plan
    sequence_length: int
    batch_size: int
    precision: str
    problem: str | None
    legality: dict[str, Any] | None
    certificate: Certificate | None
    is_main_process: bool

    def refusals(self) -> list[str]:
        """Return why there is no score, one line per reason; an empty list if there is one."""
        reasons = [f"the scorer is not legal: {self.problem}"] if self.problem else []
        if self.certificate is not None and not self.certificate.holds:
            reasons.append(self.certificate.line)
            if self.evaluation is not None:  # the text was rewritten, but is known
                facts = self.certificate.facts
                counts = {self.certificate.unit: facts["decoded_bytes"], "bits per raw byte": facts["num_bytes"]}
                if facts["challenge_bytes"] not in (None, facts["decoded_bytes"]):
                    counts["bits per byte by Parameter Golf's rule"] = facts["challenge_bytes"]
                for unit, num_bytes in counts.items():
                    score = bits_per_byte(self.evaluation.nats, num_bytes)
                    reasons.append(f"it would be {score:.4f} {unit} ({num_bytes:,} bytes)")
        return reasons

    def figures(self) -> dict[str, Any]:
        """Return the score and its settings for --json."""
        assert self.evaluation is not None
        names = ("loss", "perplexity", "bits_per_byte", "num_tokens", "num_bytes")
        return {
            "model": self.options.model,
            "sequence_length": self.sequence_length,
            "batch_size": self.batch_size,
            "mixed_precision": self.precision,
            **{name: getattr(self.evaluation, name) for name in names},
            "coverage": self.plan.coverage(),
            "adapt_rate": self.options.adapt_rate,
            "legality": self.legality,
            "certificate": self.certificate and self.certificate.line,
            **self._challenge(),
        }

    def _challenge(self) -> dict[str, Any]:
        """Return the score by Parameter Golf's rule, if it counts other bytes."""
        counted = self.certificate.facts["challenge_bytes"] if self.certificate is not None else None
        if self.evaluation is None or counted in (None, self.evaluation.num_bytes):
            return {}
        return {
            "challenge_bits_per_byte": bits_per_byte(self.evaluation.nats, counted),
            "challenge_bytes": counted,
        }

    def table(self) -> str:
        """Return the score and its settings for a person."""
        assert self.evaluation is not None
        rows = [
            ("model", self.options.model),
            ("text", f"{self.evaluation.num_bytes:,} bytes, {self.evaluation.num_tokens:,} tokens"),
            ("context", f"{self.sequence_length:,} tokens, in batches of {self.batch_size:,}"),
            ("precision", "fp32" if self.precision == "no" else self.precision),
            ("coverage", describe_coverage(self.plan)),
        ]
        if self.options.adapt_rate:
            rows.append(
                ("adaptation", f"learns from each window once it is scored, at a rate of {self.options.adapt_rate:g}")
            )
        if self.legality is not None:
            checked, sha256 = f"{self.legality['checked_tokens']:,}", self.legality["distributions_sha256"][:16]
            rows.append(("legality", f"{checked} secret tokens changed nothing; sha256 of all distributions {sha256}"))
        if self.certificate is not None:
            rows.append(("certificate", self.certificate.line))
        rows += [
            ("loss", f"{self.evaluation.loss:.4f} nats per token"),
            ("perplexity", f"{self.evaluation.perplexity:,.4f}"),
            ("bits per byte", f"{self.evaluation.bits_per_byte:.4f}"),
        ]
        if challenge := self._challenge():
            score, counted = challenge.values()
            rows.append(
                ("challenge", f"{score:.4f} bits per byte by Parameter Golf's rule, which counts {counted:,} bytes")
            )
        return "\n".join(f"{name:<15}{value}" for name, value in rows)


def evaluate_text(options: EvaluationOptions) -> TextEvaluation:
    """Evaluate a model on files. Raises UserError for anything about the model, the files or the options."""
    precision = evaluation_precision(options.mixed_precision)
    accelerator = Accelerator(mixed_precision=precision)
    is_main = accelerator.is_main_process
    # one choice for all processes: a run that trains may save another checkpoint meanwhile
    several = accelerator.num_processes > 1
    model, tokenizer = load_exported(decide(lambda: find_model(options.model)) if several else options.model)
    options = replace(options, model=str(model.name_or_path))
    length = evaluation_length(model, options.sequence_length)
    stride = options.stride or max(1, length // 2)
    if stride > length:
        raise UserError(f"--stride: {stride} is out of range; allowed: 1 to {length}, the --sequence_length.")
    choose_attention(model, accelerator.device, precision, length)  # as in training: the same loss in bf16
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = next(model.get_input_embeddings().parameters()).shape[0]
        corpus, tokens = tokenize_files(
            options.files, tokenizer, vocab_size, options.text_column, Path(folder), options.train_files
        )
        model = model.to(accelerator.device)
        device = accelerator.device
        free_bytes = free_memory_bytes(device) // (1 if device.type == "cuda" else accelerator.num_processes)
        fitting = evaluation_batch_size(model, length, device.type, free_bytes)
        # equal on all ranks; under guard a window at a time, because each pass is checked at one place
        batch_size = options.batch_size or (1 if options.check_legality else min(gather_object([fitting])))
        if options.per_document:
            plan, num_bytes = plan_documents(tokens.val, tokens.tokenizer, length)
        else:
            plan, num_bytes = plan_evaluation(
                tokens.val,
                tokens.tokenizer,
                options.evaluation,
                length,
                stride,
                drop_tail=options.drop_tail,
                skip_separators=options.skip_separators,
            )
        certificate = None
        if options.certify:
            certificate = certify(corpus, tokens, plan, searched="training" if options.train_files else None)
        evaluation = problem = legality = None
        if certificate is None or certificate.holds or not certificate.is_lossless:
            if options.adapt_rate or options.check_legality:
                try:
                    evaluation, legality = evaluate_in_order(
                        model,
                        tokens.val,
                        accelerator,
                        plan,
                        vocab_size,
                        batch_size=batch_size,
                        adapt_rate=options.adapt_rate,
                        is_guarded=options.check_legality,
                    )
                except IllegalScorer as error:
                    problem = str(error)
            else:
                batches = math.ceil(len(plan.windows) / (batch_size * accelerator.num_processes))
                hidden = None if is_main else True  # None: if stderr is no terminal
                with tqdm(total=batches, unit=" batches", desc="evaluate", disable=hidden, leave=False) as bar:
                    evaluation = evaluate_plan(
                        model, tokens.val, accelerator, plan, num_bytes, batch_size=batch_size, before_batch=bar.update
                    )
    return TextEvaluation(
        options, evaluation, plan, length, batch_size, precision, problem, legality, certificate, is_main
    )


def evaluation_precision(stated: Any) -> str:
    """Return the precision of an evaluation; None: what a run on this machine would use."""
    train = TrainSection(max_steps=1, mixed_precision=stated)
    resolved = ResolvedConfig(RunConfig(train=train), {"train.mixed_precision": "the command line"})
    return choose_precision(resolved)[0]
