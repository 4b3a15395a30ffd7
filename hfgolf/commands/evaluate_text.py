"""Evaluate an exported model on text files: what hfgolf evaluate does between its options and its table.

Owns the order: options that do not go together, the model, the tokens, the plan, the legality test, the certificate,
the score. The evaluate package does each of them.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from hfgolf.commands.options import Answer
from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import RunConfig, TrainSection
from hfgolf.evaluate.bits_per_byte import Evaluation, bits_per_byte
from hfgolf.evaluate.context import evaluation_length
from hfgolf.evaluate.loss import describe_coverage, evaluate_plan, plan_documents, plan_evaluation
from hfgolf.evaluate.text import tokenize_files
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
    certificate: Path | None = None
    """The file to write the certificate to."""

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
        if self.train_files and self.certificate is None:
            raise UserError("--train_files is for --certificate: name its file.")


def evaluate_text(options: EvaluationOptions) -> Answer | None:
    """Evaluate a model on files; return the score and what it rests on, or why there is none. None: another process.

    Raises UserError for anything about the model, the files or the options.
    """
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
            unscored = {"drop_tail": options.drop_tail, "skip_separators": options.skip_separators}
            mode = options.evaluation
            plan, num_bytes = plan_evaluation(tokens.val, tokens.tokenizer, mode, length, stride, **unscored)
        certificate = None
        if options.certificate is not None:
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
    if not is_main:
        return None
    if certificate is not None and options.certificate is not None:
        certificate.write(options.certificate)
    if refusals := _refusals(evaluation, certificate, problem):
        print(*(f"no score: {reason}" for reason in refusals), sep="\n", file=sys.stderr)
        return Answer({"refusals": refusals}, status=1)
    assert evaluation is not None
    names = ("loss", "perplexity", "bits_per_byte", "num_tokens", "num_bytes")
    figures = {
        "model": options.model,
        "sequence_length": length,
        "batch_size": batch_size,
        "mixed_precision": precision,
        **{name: getattr(evaluation, name) for name in names},
        "coverage": plan.coverage(),
        "adapt_rate": options.adapt_rate,
        "legality": legality,
        "certificate": certificate and certificate.line,
    }
    counted = None if certificate is None else certificate.facts["challenge_bytes"]
    if counted not in (None, evaluation.num_bytes):  # Parameter Golf's rule counts other bytes
        score = bits_per_byte(evaluation.nats, counted)
        figures |= {"challenge_bits_per_byte": score, "challenge_bytes": counted}
    return Answer(figures, _table(figures, describe_coverage(plan)))


def _refusals(evaluation: Evaluation | None, certificate: Certificate | None, problem: str | None) -> list[str]:
    """Return why there is no score, one line per reason; an empty list if there is one. problem: what is illegal."""
    reasons = [f"the scorer is not legal: {problem}"] if problem else []
    if certificate is not None and not certificate.holds:
        reasons.append(certificate.line)
        if evaluation is not None:  # the text was rewritten, but is known
            facts = certificate.facts
            counts = {certificate.unit: facts["decoded_bytes"], "bits per raw byte": facts["num_bytes"]}
            if facts["challenge_bytes"] not in (None, facts["decoded_bytes"]):
                counts["bits per byte by Parameter Golf's rule"] = facts["challenge_bytes"]
            for unit, num_bytes in counts.items():
                score = bits_per_byte(evaluation.nats, num_bytes)
                reasons.append(f"it would be {score:.4f} {unit} ({num_bytes:,} bytes)")
    return reasons


def _table(figures: Mapping[str, Any], coverage: str) -> str:
    """Return the figures for a person. coverage: which tokens were scored, in words."""
    rows = {
        "model": figures["model"],
        "text": f"{figures['num_bytes']:,} bytes, {figures['num_tokens']:,} tokens",
        "context": f"{figures['sequence_length']:,} tokens, in batches of {figures['batch_size']:,}",
        "precision": "fp32" if figures["mixed_precision"] == "no" else figures["mixed_precision"],
        "coverage": coverage,
    }
    if rate := figures["adapt_rate"]:
        rows["adaptation"] = f"learns from each window once it is scored, at a rate of {rate:g}"
    if legality := figures["legality"]:
        checked, sha256 = f"{legality['checked_tokens']:,}", legality["distributions_sha256"][:16]
        rows["legality"] = f"{checked} secret tokens changed nothing; sha256 of all distributions {sha256}"
    if certificate := figures["certificate"]:
        rows["certificate"] = certificate
    rows |= {
        "loss": f"{figures['loss']:.4f} nats per token",
        "perplexity": f"{figures['perplexity']:,.4f}",
        "bits per byte": f"{figures['bits_per_byte']:.4f}",
    }
    if "challenge_bytes" in figures:
        score, counted = figures["challenge_bits_per_byte"], figures["challenge_bytes"]
        rows["challenge"] = f"{score:.4f} bits per byte by Parameter Golf's rule, which counts {counted:,} bytes"
    return "\n".join(f"{name:<15}{value}" for name, value in rows.items())


def evaluation_precision(stated: Any) -> str:
    """Return the precision of an evaluation; None: what a run on this machine would use."""
    train = TrainSection(max_steps=1, mixed_precision=stated)
    resolved = ResolvedConfig(RunConfig(train=train), {"train.mixed_precision": "the command line"})
    return choose_precision(resolved)[0]
