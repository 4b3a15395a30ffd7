"""From a model to files that fit in a number of bytes, with a score that anybody can repeat from these files alone.

Owns the sequence: certificate, score, curvature, rounding, coding, files, the score of the files, ledger. Each step is
another module's. Knows no command line.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hfgolf.data.batches import Batch
from hfgolf.evaluate.context import evaluation_mode
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.evaluate.windows import plan_windows
from hfgolf.golf import artifact
from hfgolf.golf.budget import COUNTS, Ledger, files_besides, read_ledger
from hfgolf.golf.certificate import Certificate, certify
from hfgolf.golf.curvature import calibration_batches, measure_curvature, token_counts
from hfgolf.golf.decoder import weights_of, weights_sha256
from hfgolf.golf.grid import Quantized
from hfgolf.golf.program import evaluate
from hfgolf.golf.quantize import QuantizedModel, matrices, quantize_model
from hfgolf.golf.rescore import ARTIFACT, CERTIFICATE, LEDGER, TOKEN_BYTES, TOKENS, rescore
from hfgolf.golf.source import Source
from hfgolf.golf.table import MatrixFigures, measure_each, table, table_data
from hfgolf.model.layers_golf import GolfNetwork
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model
from hfgolf.system.durable import replace_folder, write_bytes, write_text
from hfgolf.system.errors import UserError, writing

MEASURED_TOKENS = 8192
"""On which the loss is measured for each matrix."""


@dataclass(frozen=True)
class Settings:
    """How to export. count: one of budget.COUNTS. code_files: more files that count.

    mode, stride: of the evaluation, see evaluate/windows.py. measure_each: evaluate the model with each matrix alone
    rounded, for the table.
    """

    budget_bytes: int
    count: str = "challenge"
    method: str = "gptq"
    allocation: str = "curvature"
    column_steps: bool = False
    calibration_tokens: int = 32768
    mode: str = "flat"
    stride: int | None = None
    code_files: Sequence[Path] = ()
    measure_each: bool = False


@dataclass
class Exported:
    """What an export found. problems: each reason why it does not count; empty if all is well.

    before, after: figures of program.evaluate, of the float weights, and of the files in a clean process; empty without
    a certificate, as is everything else. rows, table: of table.py, the latter as JSON. figures: what ledger.json says.
    seconds: of each step.
    """

    folder: Path
    certificate: Certificate
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    ledger: Ledger | None = None
    quantized: QuantizedModel | None = None
    weights_sha256: str = ""
    rows: list[MatrixFigures] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def export(
    source: Source, settings: Settings, folder: Path, progress: Callable[[str], None] = lambda line: None
) -> Exported:
    """Export a model to `folder`, replacing what is there: artifact, program, evaluation text, ledger, table and model.

    Raises UserError if the budget is too small for the model, or a file can't be written.
    """
    with writing("--output", folder):
        return _Export(source, settings, folder, progress).run()


class _Export:
    def __init__(self, source: Source, settings: Settings, folder: Path, progress: Callable[[str], None]) -> None:
        self.source, self.settings, self.folder = source, settings, folder
        self.partial = folder.with_name(f".partial-{folder.name}")
        self.started_at = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.say = lambda line: progress(f"[{time.perf_counter() - self.started_at:5.0f} s] {line}")

    def run(self) -> Exported:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        exported = Exported(self.folder, self._certificate())
        exported.seconds = self.seconds
        exported.certificate.write(self.partial / CERTIFICATE)
        if exported.certificate.holds:
            self._export(exported)
        else:
            exported.problems.append(exported.certificate.line)
        replace_folder(self.partial, self.folder)
        return exported

    def _export(self, exported: Exported) -> None:
        source, settings = self.source, self.settings
        tokens, token_bytes = self._write_text()
        files = self._write_files()
        fixed = sum(path.stat().st_size for path, counted_by in files.items() if settings.count in counted_by)
        exported.before = self._timed("score before", lambda: self._score(tokens, token_bytes))
        curvature = self._timed("curvature", self._curvature)
        weights, coder = matrices(source.model), _Coder(source.model)
        exported.quantized = self._timed(
            "rounding and coding",
            lambda: quantize_model(
                source.model,
                curvature,
                budget_bytes=settings.budget_bytes,
                overhead_bytes=fixed,
                size_of=lambda tensors: len(coder.encode(tensors).data),
                method=settings.method,
                allocation=settings.allocation,
                column_steps=settings.column_steps,
                progress=self.say,
            ),
        )
        encoded = coder.encode(exported.quantized.tensors)
        write_bytes(self.partial / ARTIFACT, encoded.data)
        decoded = artifact.decode(encoded.data, _shapes(source.model))[1]
        exported.weights_sha256 = weights_sha256(weights_of(decoded.values()))
        if not _is_same(exported.quantized.tensors, decoded):
            exported.problems.append("The artifact does not decode to the integers that were coded.")
        exported.after = self._timed("score of the files", self._rescore)
        self._check(exported)
        files = {self.partial / ARTIFACT: COUNTS} | files
        exported.ledger = read_ledger(files, settings.count, settings.budget_bytes)
        if exported.ledger.problem:
            exported.problems.append(exported.ledger.problem)
        measured = self._measured(exported.quantized) if settings.measure_each else None
        exported.rows = table(weights, exported.quantized.tensors, curvature, encoded.tensors, measured)
        exported.table = table_data(exported.rows) | {"parts": encoded.parts}
        self._write_figures(exported)
        _load(source.model, decoded)
        export_model(source.model, source.tokenizer, self.partial / "model", self._card(exported))

    def _timed(self, step: str, work: Callable[[], Any]) -> Any:
        started_at = time.perf_counter()
        self.say(f"{step} ...")
        result = work()
        self.seconds[step] = time.perf_counter() - started_at
        return result

    def _certificate(self) -> Certificate:
        source, settings = self.source, self.settings
        tokens = source.tokens.val.tokens
        (separators,) = np.nonzero(tokens == source.tokenizer.eos_token_id)
        length = min(source.model.config.max_position_embeddings, max(1, len(tokens) - 1))
        stride = settings.stride and min(settings.stride, length)
        try:
            plan = plan_windows(settings.mode, len(tokens), length, stride, separators)
        except ValueError as error:
            raise UserError(f"--mode: {error}.") from None
        certificate: Certificate = self._timed(
            "certificate",
            lambda: certify(source.corpus, source.tokens, plan, is_training_known=source.is_training_known),
        )
        return certificate

    def _write_text(self) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Write the evaluation text as score.py reads it."""
        stream = self.source.tokens.val
        dtype = "<u2" if self.source.model.config.vocab_size <= 2**16 else "<u4"
        token_bytes = bytes_per_token(stream, self.source.tokenizer)
        write_bytes(self.partial / TOKENS, stream.tokens.astype(dtype).tobytes())
        write_bytes(self.partial / TOKEN_BYTES, token_bytes.astype("<u2").tobytes())
        return np.asarray(stream.tokens), token_bytes

    def _write_files(self) -> dict[Path, tuple[str, ...]]:
        """Write all files of the ledger but the artifact; return how each counts."""
        source = self.source
        files = files_besides(source.model.config, source.tokenizer, source.run_config)
        files |= {path.name: (path.read_bytes(), COUNTS) for path in self.settings.code_files}
        for name, (content, _) in files.items():
            write_bytes(self.partial / name, content)
        counted = {name: how for name, (_, how) in files.items()} | {TOKENS: (), TOKEN_BYTES: ()}
        return {self.partial / name: how for name, how in counted.items()}

    def _score(self, tokens: NDArray[np.integer], token_bytes: NDArray[np.integer]) -> dict[str, Any]:
        model = self.source.model
        network = GolfNetwork(model.config).eval()
        state = model.state_dict()
        network.load_state_dict({name: state[name] for name in network.state_dict()})
        return evaluate(network, model.config, tokens, token_bytes, self.settings.mode, self.settings.stride)

    def _curvature(self) -> Any:
        stream, model = self.source.tokens.train, self.source.model
        batches = self._calibration_batches(self.source.blocks_read, self.settings.calibration_tokens)
        return measure_curvature(model, batches, token_counts(stream, model.config.vocab_size))

    def _calibration_batches(self, blocks_read: int, num_tokens: int) -> Iterator[Batch]:
        source = self.source
        return calibration_batches(
            source.tokens.train,
            seed=source.seed,
            sequence_length=source.sequence_length,
            blocks_read=blocks_read,
            num_tokens=num_tokens,
        )

    def _measured(self, quantized: QuantizedModel) -> dict[str, float]:
        """Return the rise of the loss for each matrix, on the training text that follows the calibration text."""
        calibration_blocks = max(1, self.settings.calibration_tokens // self.source.sequence_length)
        batches = list(self._calibration_batches(self.source.blocks_read + calibration_blocks, MEASURED_TOKENS))

        def loss_of(model: nn.Module) -> float:
            with evaluation_mode(model), torch.no_grad():
                losses = [float(model(**batch).loss) for batch in batches]
            return float(np.average(losses, weights=[batch["input_ids"].numel() for batch in batches]))

        measured: dict[str, float] = self._timed(
            "loss of each matrix", lambda: measure_each(self.source.model, quantized.tensors, loss_of, self.say)
        )
        return measured

    def _rescore(self) -> dict[str, Any]:
        return rescore(self.partial, self.settings.mode, self.settings.stride)

    def _check(self, exported: Exported) -> None:
        """Compare what the clean process says with what this one knows."""
        if exported.after["sha256"] != exported.weights_sha256:
            exported.problems.append("The round trip differs: score.py decoded other weights than this process.")
        scored = {key: exported.after[key] for key in exported.before if key not in ("nats", "bpb")}
        expected = {key: exported.before[key] for key in scored}
        if scored != expected or scored["bytes"] != exported.certificate.facts["scored_bytes"]:
            exported.problems.append(f"The round trip differs: score.py scored {scored} instead of {expected}.")

    def _write_figures(self, exported: Exported) -> None:
        if exported.ledger is None or exported.quantized is None:
            return
        settings = {key: value for key, value in vars(self.settings).items() if key != "code_files"}
        exported.figures = exported.ledger.as_data() | {
            "weights_sha256": exported.weights_sha256,
            "before": exported.before,
            "after": exported.after,
            "settings": settings,
            "D": exported.quantized.scale,
            "sdclip_k": exported.quantized.sdclip_k,
            "seconds": self.seconds,
            "problems": exported.problems,
        }
        write_text(self.partial / LEDGER, json.dumps(exported.figures, indent=1) + "\n")
        write_text(self.partial / "table.json", json.dumps(exported.table, indent=1) + "\n")

    def _card(self, exported: Exported) -> str:
        """Return the model's card with a section on its bytes, in front of the one on its training."""
        after, before, ledger = exported.after, exported.before, exported.ledger
        assert ledger is not None
        loss = after["nats"] / after["tokens"]
        figures = {
            "model": str(self.folder / "model"),
            "val_loss": loss,
            "val_perplexity": math.exp(min(loss, 700.0)),
            "val_bits_per_byte": after["bpb"],
            "val_tokens": after["tokens"],
            "val_bytes": after["bytes"],
        }
        card = self.source.card(figures)
        sizes = {entry.name: entry.num_bytes for entry in ledger.entries}
        section = (
            "## How small it is\n\n"
            f"These weights come from an artifact of {sizes[ARTIFACT]:,} bytes: rounded to integers times steps, and"
            f" entropy-coded. With the program that decodes and scores it, that is {ledger.total():,} bytes of a budget"
            f" of {ledger.budget_bytes:,}. The program, run on these files alone, scores {after['bpb']:.4f} bits per"
            f" byte ({before['bpb']:.4f} before rounding) on {after['tokens']:,} tokens, {after['bytes']:,} bytes, in"
            f" mode {after['mode']}. SHA-256 of the weights in fp32: `{exported.weights_sha256}`.\n\n"
        )
        before_training, heading, training = card.partition("## How it was trained")
        return f"{before_training.rstrip()}\n\n{section}{heading}{training}".rstrip() + "\n"


class _Coder:
    """Encodes a model, and remembers the last result: it is the one to keep, as a rule."""

    def __init__(self, model: GolfForCausalLM) -> None:
        self._encode = artifact.model_encoder(model)
        self._last: tuple[Mapping[str, Quantized], artifact.Encoded] | None = None

    def encode(self, tensors: Mapping[str, Quantized]) -> artifact.Encoded:
        if self._last is None or self._last[0] is not tensors:
            self._last = tensors, self._encode(tensors)
        return self._last[1]


def _shapes(model: GolfForCausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that score.py expects, in its order: a tied head is not among them."""
    with torch.device("meta"):
        network = GolfNetwork(model.config)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def _is_same(tensors: dict[str, Quantized], decoded: dict[str, artifact.Tensor]) -> bool:
    pairs = [(tensor, decoded[name]) for name, tensor in tensors.items()]
    return all(isinstance(b, Quantized) and np.array_equal(a.dequantized(), b.dequantized()) for a, b in pairs)


def _load(model: GolfForCausalLM, tensors: dict[str, artifact.Tensor]) -> None:
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in zip(tensors, weights_of(tensors.values()), strict=True):
            state[name].copy_(torch.from_numpy(np.asarray(weight)))
