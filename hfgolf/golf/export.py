"""From a model to files that fit in a number of bytes, with a score that anybody can repeat from these files alone.

Owns the sequence: certificate, score, curvature, rounding, coding, files, the score of the files, ledger. Each step is
another module's. Knows no command line.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from hfgolf.config.sections import GolfSection
from hfgolf.evaluate.token_bytes import bytes_per_token
from hfgolf.golf import artifact
from hfgolf.golf.budget import COUNTS, files_besides, read_ledger
from hfgolf.golf.certificate import Certificate, certify
from hfgolf.golf.curvature import Curvature, calibration_batches, measure_curvature, token_counts
from hfgolf.golf.decoder import weights_of, weights_sha256
from hfgolf.golf.grid import Quantized
from hfgolf.golf.program import evaluate, plan_of
from hfgolf.golf.quantize import QuantizedModel, matrices, quantize_model
from hfgolf.golf.rescore import ARTIFACT, CERTIFICATE, LEDGER, TOKEN_BYTES, TOKENS, rescore
from hfgolf.golf.source import Source
from hfgolf.golf.table import Row, table, table_data
from hfgolf.model.layers_golf import GolfNetwork
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model
from hfgolf.system.durable import replace_folder, write_bytes, write_text
from hfgolf.system.errors import UserError, writing

Result = TypeVar("Result")


@dataclass(frozen=True)
class Settings:
    """How to export. golf: the section of a config, with a budget. code_files: more files that count.

    mode, stride: of the evaluation, see evaluate/windows.py.
    """

    golf: GolfSection
    column_steps: bool = False
    mode: str = "flat"
    stride: int | None = None
    code_files: Sequence[Path] = ()


@dataclass
class Exported:
    """What an export found. problems: each reason why it does not count; empty if all is well.

    ledger, table: the content of ledger.json and table.json; rows: of table.py. These and quantized are empty without a
    certificate.
    """

    folder: Path
    certificate: Certificate
    quantized: QuantizedModel | None = None
    rows: list[Row] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def export(
    source: Source, settings: Settings, folder: Path, progress: Callable[[str], None] = lambda line: None
) -> Exported:
    """Export a model to `folder`, replacing what is there: artifact, program, evaluation text, ledger, table and model.

    Raises UserError if the budget is too small for the model, or a file can't be written.
    """
    with writing("--output", folder):
        partial = folder.with_name(f".partial-{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        exported = _Export(source, settings, folder, partial, progress).run()
        replace_folder(partial, folder)
    return exported


class _Export:
    """One export, to the folder `partial`."""

    def __init__(
        self, source: Source, settings: Settings, folder: Path, partial: Path, progress: Callable[[str], None]
    ) -> None:
        self.source, self.settings, self.folder, self.partial = source, settings, folder, partial
        self.started_at = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.say = lambda line: progress(f"[{time.perf_counter() - self.started_at:5.0f} s] {line}")

    def run(self) -> Exported:
        certificate = self._timed("certificate", self._certificate)
        certificate.write(self.partial / CERTIFICATE)
        if not certificate.holds:
            return Exported(self.folder, certificate, problems=[certificate.line])
        source, golf = self.source, self.settings.golf
        files = self._write_files()
        fixed = sum(path.stat().st_size for path, counted_by in files.items() if golf.count in counted_by)
        before = self._timed("score before", self._score)
        curvature = self._timed("curvature", self._curvature)
        weights, coder = matrices(source.model), _Coder(source.model)
        quantized = self._timed("rounding and coding", lambda: self._quantize(curvature, fixed, coder))
        encoded = coder.encode(quantized.tensors)
        write_bytes(self.partial / ARTIFACT, encoded.data)
        decoded = artifact.decode(encoded.data, _shapes(source.model))[1]
        sha256 = weights_sha256(weights_of(decoded.values()))
        after = self._timed(
            "score of the files", lambda: rescore(self.partial, self.settings.mode, self.settings.stride)
        )
        ledger = read_ledger({self.partial / ARTIFACT: COUNTS} | files, golf.count, golf.budget_bytes or 0)
        problems = _round_trip_problems(quantized.tensors, decoded, before, after, sha256)
        problems += [ledger.problem] if ledger.problem else []
        if after["bytes"] != certificate.facts["scored_bytes"]:
            problems.append(f"score.py scored {after['bytes']:,} bytes, which are not those of the certificate.")
        rows = table(weights, quantized.tensors, curvature, encoded.tensors)
        exported = Exported(self.folder, certificate, quantized, rows, problems=problems)
        exported.table = table_data(rows) | {"parts": encoded.parts}
        exported.ledger = ledger.as_data() | {
            "weights_sha256": sha256,
            "before": before,
            "after": after,
            "settings": golf.model_dump()
            | {name: getattr(self.settings, name) for name in ("column_steps", "mode", "stride")},
            "D": quantized.scale,
            "sdclip_k": quantized.sdclip_k,
            "seconds": self.seconds,
            "problems": problems,
        }
        for name, content in ((LEDGER, exported.ledger), ("table.json", exported.table)):
            write_text(self.partial / name, json.dumps(content, indent=1) + "\n")
        _load(source.model, decoded)
        card = _card(source, exported.ledger, self.folder / "model")
        export_model(source.model, source.tokenizer, self.partial / "model", card)
        return exported

    def _timed(self, step: str, work: Callable[[], Result]) -> Result:
        started_at = time.perf_counter()
        self.say(f"{step} ...")
        result = work()
        self.seconds[step] = time.perf_counter() - started_at
        return result

    def _certificate(self) -> Certificate:
        source, settings = self.source, self.settings
        try:
            plan = plan_of(source.model.config, source.tokens.val.tokens, settings.mode, settings.stride)
        except ValueError as error:
            raise UserError(f"--mode: {error}.") from None
        return certify(source.corpus, source.tokens, plan, is_training_known=source.is_training_known)

    def _write_files(self) -> dict[Path, tuple[str, ...]]:
        """Write all files of the ledger but the artifact; return those of COUNTS that count each."""
        source = self.source
        stream, dtype = source.tokens.val, "<u2" if source.model.config.vocab_size <= 2**16 else "<u4"
        self.tokens, self.token_bytes = np.asarray(stream.tokens), bytes_per_token(stream, source.tokenizer)
        files = files_besides(source.model.config, source.tokenizer, source.run_config)
        files |= {path.name: (path.read_bytes(), COUNTS) for path in self.settings.code_files}
        files[TOKENS] = self.tokens.astype(dtype).tobytes(), ()
        files[TOKEN_BYTES] = self.token_bytes.astype("<u2").tobytes(), ()
        for name, (content, _) in files.items():
            write_bytes(self.partial / name, content)
        return {self.partial / name: counted_by for name, (_, counted_by) in files.items()}

    def _score(self) -> dict[str, Any]:
        """Score the float weights in this process, as score.py will score the rounded ones."""
        model = self.source.model
        network = GolfNetwork(model.config).eval()
        state = model.state_dict()
        network.load_state_dict({name: state[name] for name in network.state_dict()})
        mode, stride = self.settings.mode, self.settings.stride
        return evaluate(network, model.config, self.tokens, self.token_bytes, mode, stride)

    def _curvature(self) -> dict[str, Curvature]:
        source, stream = self.source, self.source.tokens.train
        batches = calibration_batches(
            stream,
            seed=source.seed,
            sequence_length=source.sequence_length,
            blocks_read=source.blocks_read,
            num_tokens=self.settings.golf.calibration_tokens,
        )
        return measure_curvature(source.model, batches, token_counts(stream, source.model.config.vocab_size))

    def _quantize(self, curvature: Mapping[str, Curvature], fixed: int, coder: _Coder) -> QuantizedModel:
        golf = self.settings.golf
        return quantize_model(
            self.source.model,
            curvature,
            budget_bytes=golf.budget_bytes or 0,
            overhead_bytes=fixed,
            size_of=lambda tensors: len(coder.encode(tensors).data),
            method=golf.method,
            allocation=golf.allocation,
            column_steps=self.settings.column_steps,
            progress=self.say,
        )


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


def _round_trip_problems(
    tensors: Mapping[str, Quantized],
    decoded: Mapping[str, artifact.Tensor],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    sha256: str,
) -> list[str]:
    """Compare what the artifact decodes to, and what the clean process says, with what this process knows."""
    problems = []
    rounded = zip(tensors.values(), weights_of([decoded[name] for name in tensors]), strict=True)
    if not all(np.array_equal(one.dequantized(), weight) for one, weight in rounded):
        problems.append("The artifact does not decode to the integers that were coded.")
    if after["sha256"] != sha256:
        problems.append("The round trip differs: score.py decoded other weights than this process.")
    expected = {key: value for key, value in before.items() if key not in ("nats", "bpb")}
    if (scored := {key: after[key] for key in expected}) != expected:
        problems.append(f"The round trip differs: score.py scored {scored} instead of {expected}.")
    return problems


def _load(model: GolfForCausalLM, tensors: Mapping[str, artifact.Tensor]) -> None:
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in zip(tensors, weights_of(tensors.values()), strict=True):
            state[name].copy_(torch.from_numpy(np.asarray(weight)))


def _card(source: Source, ledger: Mapping[str, Any], folder: Path) -> str:
    """Return the model's card with a section on its bytes, in front of the one on its training."""
    after, before = ledger["after"], ledger["before"]
    loss = after["nats"] / after["tokens"]
    card = source.card(
        {
            "model": str(folder),
            "val_loss": loss,
            "val_perplexity": math.exp(min(loss, 700.0)),
            "val_bits_per_byte": after["bpb"],
            "val_tokens": after["tokens"],
            "val_bytes": after["bytes"],
        }
    )
    size = next(file["bytes"] for file in ledger["files"] if file["name"] == ARTIFACT)
    section = (
        "## How small it is\n\n"
        f"These weights come from an artifact of {size:,} bytes: rounded to integers times steps, and entropy-coded."
        f" With the program that decodes and scores it, that is {ledger['totals'][ledger['count']]:,} bytes of a budget"
        f" of {ledger['budget_bytes']:,}. The program, run on these files alone, scores {after['bpb']:.4f} bits per"
        f" byte ({before['bpb']:.4f} before rounding) on {after['tokens']:,} tokens, {after['bytes']:,} bytes, in mode"
        f" {after['mode']}. SHA-256 of the weights in fp32: `{ledger['weights_sha256']}`.\n\n"
    )
    before_training, heading, training = card.partition("## How it was trained")
    return f"{before_training.rstrip()}\n\n{section}{heading}{training}".rstrip() + "\n"
