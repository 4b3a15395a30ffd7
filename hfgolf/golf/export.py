"""From a model to files that fit in a number of bytes, with a score that anybody can repeat from these files alone.

Owns the sequence: certificate, score, curvature, rounding, coding, files, the score of the files, ledger. Each step is
another module's. Knows no command line.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfgolf.config.sections import GolfSection
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.golf.artifact import Encoded, model_encoder
from hfgolf.golf.certificate import Certificate, certify
from hfgolf.golf.curvature import Curvature, calibrated_curvature, calibration_batches
from hfgolf.golf.ledger import (
    ARTIFACT,
    CERTIFICATE,
    COUNTS,
    EVALUATION,
    LEDGER,
    MODEL,
    TABLE,
    TOKEN_BYTES,
    TOKENS,
    budget_problem,
    files_besides,
    read_ledger,
    rescore,
)
from hfgolf.golf.packing import StateCoding, fill, unpacked
from hfgolf.golf.program import evaluate, load_model, plan_of
from hfgolf.golf.quantize import Grids, QuantizedModel, Weights, matrices, require_room, stored
from hfgolf.golf.source import Source
from hfgolf.golf.table import table, table_data
from hfgolf.golf.unpack import state_sha256
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model
from hfgolf.publish.model_card import with_golf_size
from hfgolf.system.durable import new_folder, write_bytes, write_text
from hfgolf.system.errors import UserError, writing

_TOKENS_PER_STEP = 512  # of the tuning after rounding


@dataclass(frozen=True)
class Settings:
    """How to export. golf: the section of a config, with a budget. code_files: more files that count.

    skip_before: do not score the weights before rounding.
    """

    golf: GolfSection
    code_files: Sequence[Path] = ()
    skip_before: bool = False


@dataclass
class Exported:
    """What an export found. problems: each reason why it does not count; empty if all is well.

    ledger, table: the content of ledger.json and table.json. These and quantized are empty without a certificate.
    """

    folder: Path
    certificate: Certificate
    quantized: QuantizedModel | None = None
    table: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def export(
    source: Source, settings: Settings, folder: Path, progress: Callable[[str], None] = lambda line: None
) -> Exported:
    """Export a model to `folder`, replacing what is there: artifact, program, evaluation text, ledger, table and model.

    Raises UserError if the budget is too small for the model, or a file can't be written.
    """
    with writing("--output", folder), new_folder(folder) as partial:
        return _export(source, settings, folder, partial, progress)


def _export(
    source: Source, settings: Settings, folder: Path, partial: Path, progress: Callable[[str], None]
) -> Exported:
    model, golf = source.model, settings.golf
    windows = golf.evaluation, golf.stride, golf.adapt_rate
    started_at, seconds = time.perf_counter(), dict[str, float]()

    def say(line: str) -> None:
        progress(f"[{time.perf_counter() - started_at:5.0f} s] {line}")

    @contextmanager
    def timed(step: str) -> Iterator[None]:
        begun_at = time.perf_counter()
        say(f"{step} ...")
        yield
        seconds[step] = time.perf_counter() - begun_at

    def score() -> dict[str, Any]:
        try:
            return evaluate(network, shape, tokens, token_bytes, *windows)
        except ValueError as error:
            raise UserError(f"--adapt_rate: {error}.") from None

    shape = _shape(source)
    with timed("certificate"):
        try:
            plan = plan_of(shape, source.tokens.val.tokens, golf.evaluation, golf.stride)
        except ValueError as error:
            raise UserError(f"--evaluation: {error}.") from None
        certificate = certify(source.corpus, source.tokens, plan, searched=source.train_split)
    certificate.write(partial / CERTIFICATE)
    if not certificate.holds:
        return Exported(folder, certificate, problems=[certificate.line])
    tokens, token_bytes = np.asarray(source.tokens.val.tokens), bytes_per_token(source.tokens.val, source.tokenizer)
    files = _write_files(source, settings, partial, tokens, token_bytes)
    overhead = sum(path.stat().st_size for path, counted_by in files.items() if golf.count in counted_by)
    budget = {"budget_bytes": golf.budget_bytes or 0, "overhead_bytes": overhead}
    coding = None if isinstance(model, GolfForCausalLM) else StateCoding(model)
    weights = matrices(model) if coding is None else coding.weights

    def encoder() -> Callable[[Grids], Encoded]:
        return model_encoder(model) if isinstance(model, GolfForCausalLM) else StateCoding(model).encode

    require_room(weights, size_of=lambda on_grids: len(encoder()(on_grids).data), **budget)
    network, before = _Logits(model), None
    if not settings.skip_before:
        with timed("score before"):
            before = score()
    with timed("curvature"):
        curvature = curvature_of(source, golf.calibration_tokens)
    with timed("rounding and coding"):
        options: dict[str, Any] = {"method": golf.method, "allocation": golf.allocation}
        batches = tuning_batches(source, golf.calibration_tokens)
        quantized, encoded = fill(model, weights, curvature, encoder, batches, progress=say, **options, **budget)
    write_bytes(partial / ARTIFACT, encoded.data)
    with timed("score of the files"):
        if coding:
            state = unpacked(partial)
            sha256 = state_sha256(state)
            model.load_state_dict(state)
            after = score() | {"sha256": sha256}
        else:
            _, decoded, sha256 = load_model(encoded.data, model.config.to_dict())
            state = decoded.state_dict()
            model.load_state_dict(state, strict=False)  # a tied head is not among the tensors of score.py
            after = rescore(partial, *windows)
        # of the model as anybody loads it
        plain = after if windows == (*EVALUATION.values(),) else evaluate(network, shape, tokens, token_bytes)
    found = {name: stored(coding.layers[name] if coding else None, state[name]) for name in quantized.tensors}
    ledger = read_ledger({partial / ARTIFACT: COUNTS} | files, golf.count, golf.budget_bytes or 0)
    expected = {"tokens": plan.num_scored, "bytes": certificate.facts["scored_bytes"], "sha256": sha256}
    problems = _round_trip_problems(quantized.tensors, found, expected | plan.coverage(), after)
    problems += [problem] if (problem := budget_problem(ledger)) else []
    ledger |= {"weights_sha256": sha256, "before": before, "after": after, "settings": golf.model_dump()}
    ledger |= {"D": quantized.scale, "sdclip_k": quantized.sdclip_k, "seconds": seconds, "problems": problems}
    data = table_data(table(weights, quantized.tensors, curvature, encoded.tensors)) | {"parts": encoded.parts}
    for name, content in ((LEDGER, ledger), (TABLE, data)):
        write_text(partial / name, json.dumps(content, indent=1) + "\n")
    if coding and (kept := coding.kept(quantized.tensors, encoded)):
        said = ", ".join(f"{name} ({num_bytes:,} bytes)" for name, num_bytes in kept.items())
        quantized.findings.append(f"Kept at 8 significant bits, because what it does could not be seen: {said}.")
    loss = plain["nats"] / plain["tokens"]
    figures = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0)), "val_bits_per_byte": plain["bpb"]}
    figures |= {"val_tokens": plain["tokens"], "val_bytes": plain["bytes"], "model": str(folder / MODEL)}
    export_model(model, source.tokenizer, partial / MODEL, with_golf_size(source.card(figures), ledger))
    return Exported(folder, certificate, quantized, data, ledger, problems)


def curvature_of(source: Source, num_tokens: int) -> dict[str, Curvature]:
    """Measure the curvature on about num_tokens of the training text that the run would have read next."""
    return calibrated_curvature(source.model, **_calibration(source, num_tokens))


def tuning_batches(source: Source, num_tokens: int) -> Iterable[Any]:
    """Return the text of curvature_of, and as much after it, in small batches."""
    rows = max(1, _TOKENS_PER_STEP // source.sequence_length)
    return calibration_batches(**_calibration(source, 2 * num_tokens), batch_size=rows)


def _calibration(source: Source, num_tokens: int) -> dict[str, Any]:
    return {
        "stream": source.tokens.train,
        "seed": source.seed,
        "sequence_length": source.sequence_length,
        "blocks_read": source.blocks_read,
        "num_tokens": num_tokens,
    }


def _write_files(
    source: Source, settings: Settings, partial: Path, tokens: np.ndarray, token_bytes: np.ndarray
) -> dict[Path, tuple[str, ...]]:
    """Write all files of the ledger but the artifact; return those of COUNTS that count each."""
    config = source.model.config if isinstance(source.model, GolfForCausalLM) else None
    files = files_besides(config, source.tokenizer, source.run_config)
    files |= {path.name: (path.read_bytes(), COUNTS) for path in settings.code_files}
    files[TOKENS] = tokens.astype("<u2" if source.model.config.vocab_size <= 2**16 else "<u4").tobytes(), ()
    files[TOKEN_BYTES] = token_bytes.astype("<u2").tobytes(), ()
    for name, (content, _) in files.items():
        write_bytes(partial / name, content)
    return {partial / name: counted_by for name, (_, counted_by) in files.items()}


class _Logits(nn.Module):
    """A model called as GolfNetwork is."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


def _shape(source: Source) -> Any:
    """Return what an evaluation reads of a model's config. Other architectures need not name it as Golf does.

    Raises UserError for rope_parameters: score.py has no form for them.
    """
    if isinstance(source.model, GolfForCausalLM):
        if rope := source.model.config.rope_parameters:
            raise UserError(
                f"golf scores only plain RoPE, and this model has rope_parameters {rope}; export the model that was"
                " trained without model.overrides.rope_parameters."
            )
        return source.model.config
    return SimpleNamespace(
        max_position_embeddings=source.sequence_length,
        eos_token_id=source.tokenizer.eos_token_id,
        vocab_size=source.model.config.vocab_size,
    )


def _round_trip_problems(
    tensors: Grids, found: Weights, expected: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """Compare what the artifact decodes to, and what the clean process says, with what this process knows."""
    problems = []
    if not all(np.array_equal(one.dequantized(), found[name]) for name, one in tensors.items()):
        problems.append("The artifact does not decode to the integers that were coded.")
    for name, value in expected.items():
        if after[name] != value:
            problems.append(f"The round trip differs: the program has {name} {after[name]} instead of {value}.")
    return problems
