"""The ledger: which files an export consists of, which of them count, and whether they fit a budget.

Reads a folder back, and scores it again in a process that sees nothing of hfgolf. Does not know how an artifact is
made.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from hfgolf.checkpoint.identity import Change, rule
from hfgolf.config.parse import as_yaml
from hfgolf.config.sections import RunConfig
from hfgolf.data.tokenizer import document_start, embedding_rows, entry_bytes, tokenizer_sha256
from hfgolf.evaluate.text import tokenize_files
from hfgolf.evaluate.token_bytes import adds_a_space, bytes_per_token
from hfgolf.evaluate.windows import MODES, plan_windows
from hfgolf.golf.certificate import certify
from hfgolf.golf.decoder import read_config
from hfgolf.golf.merges import pack_tokenizer, unpack_tokenizer
from hfgolf.golf.script import defaults, packed_script, packed_unpack, smallest_lzma
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.layers_golf import GolfNetwork
from hfgolf.run.record import read_json
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import free_memory_bytes
from hfgolf.system.redact import redact_values
from hfgolf.system.wording import count_of, one_line

COUNTS = ("challenge", "everything")
"""challenge: the program and the weights, as in Parameter Golf. everything: also what was needed to make them."""
ARTIFACT, SCRIPT, UNPACK = "artifact.bin", "score.py", "unpack.py"
TOKENS, TOKEN_BYTES = "tokens.bin", "bytes.bin"
TOKENIZER, CONFIG = "tokenizer.json.xz", "config.yaml.xz"
LEDGER, CERTIFICATE, TABLE, MODEL = "ledger.json", "certificate.json", "table.json", "model"
_COUNTED_BY: dict[str, tuple[str, ...]] = {
    **{ARTIFACT: COUNTS, SCRIPT: COUNTS, TOKENIZER: COUNTS[1:], CONFIG: COUNTS[1:]},
    **{TOKENS: (), TOKEN_BYTES: (), UNPACK: COUNTS},
}
_RELATIVE_TOLERANCE = 1e-6  # of nats: another machine, or another number of threads, adds in another order
_ADAPTED_TOLERANCE = 1e-4  # each step of test-time training magnifies that
_BYTES_PER_WEIGHT = 12  # its integer, its value, and the model's
OWN_NAMES = {*_COUNTED_BY, LEDGER, CERTIFICATE, TABLE, MODEL}
"""What an export writes: no other file that counts may have one of these names."""
EVALUATION = {"evaluation": "flat", "stride": None, "adapt_rate": 0.0}
"""{setting of the golf section: its default, also in ledgers that do not have it}."""


def files_besides(
    config: GolfConfig | None, tokenizer: PreTrainedTokenizerFast, run_config: RunConfig | None
) -> dict[str, tuple[bytes, tuple[str, ...]]]:
    """Return {name: (content, those of COUNTS that count it)} of all that a budget must hold next to the artifact.

    config: None: that of another architecture, which unpack.py reads. run_config: what it takes to train the model
    again; None: it is not known.
    """
    contents = {UNPACK: packed_unpack()} if config is None else {SCRIPT: packed_script(config)}
    contents[TOKENIZER] = pack_tokenizer(tokenizer.backend_tokenizer)
    if run_config is not None:
        contents[CONFIG] = smallest_lzma(training_config(run_config).encode())
    return {name: (content, _COUNTED_BY[name]) for name, content in contents.items()}


def bytes_besides(config: GolfConfig, tokenizer: PreTrainedTokenizerFast, run_config: RunConfig, count: str) -> int:
    """Return what the files next to the artifact take, of those that `count`, one of COUNTS, counts."""
    files = files_besides(config, tokenizer, run_config).values()
    return sum(len(content) for content, counted_by in files if count in counted_by)


def training_config(config: RunConfig) -> str:
    """Return the YAML to train a model again: the keys that affect the weights and are not at their defaults.

    Of files, only the names. So a resume, another machine, or another folder leaves it as it is, and with it the bytes
    that golf.count everything counts.
    """
    defaults, lines = RunConfig().flat(), list[str]()
    for dotted, value in config.flat().items():
        section, key = dotted.split(".")
        is_of_golf = section == "golf" and key != "forecast_every_steps"
        if value == defaults[dotted] or (rule(dotted) is Change.FREE and not is_of_golf):
            continue
        if rule(dotted) is Change.TEXT and isinstance(value, list):
            value = [name if "://" in name else os.path.basename(name) for name in value]
        if f"{section}:" not in lines:
            lines.append(f"{section}:")
        lines.append(f"  {key}: {as_yaml(redact_values(value))}")
    return "\n".join(lines) + "\n"


def read_ledger(files: Mapping[Path, tuple[str, ...]], count: str, budget_bytes: int) -> dict[str, Any]:
    """Read files back from disk, and return what ledger.json says of them. Raises OSError if one can't be read.

    files: {path: those of COUNTS that count it}. count: one of COUNTS.
    """
    entries: list[dict[str, Any]] = []
    for path, counted_by in files.items():
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        entries.append({"name": path.name, "bytes": len(content), "sha256": sha256, "counted_by": [*counted_by]})
    totals = {one: sum(entry["bytes"] for entry in entries if one in entry["counted_by"]) for one in COUNTS}
    return {"budget_bytes": budget_bytes, "count": count, "totals": totals, "files": entries}


def budget_problem(ledger: Mapping[str, Any]) -> str | None:
    """Return how the files exceed the budget, and which could give how many bytes; None if they fit."""
    count, budget = ledger["count"], ledger["budget_bytes"]
    total = ledger["totals"][count]
    excess = total - budget
    if excess <= 0:
        return None
    givers = sorted((file for file in ledger["files"] if count in file["counted_by"]), key=lambda file: -file["bytes"])
    could = [f"{file['name']} could give {min(excess, file['bytes']):,} of its {file['bytes']:,}" for file in givers]
    return f"{total:,} bytes are {excess:,} more than the budget of {budget:,}: {', '.join(could)}."


def rescore(folder: Path, mode: str = "flat", stride: int | None = None, adapt_rate: float = 0.0) -> dict[str, Any]:
    """Return what score.py prints: nats, tokens, bytes, bpb, the sha256 of the weights, and the coverage.

    The process sees nothing of hfgolf (see run_alone). Raises UserError with the program's own words if it refuses the
    files.
    """
    files = [str((folder / name).resolve()) for name in (SCRIPT, ARTIFACT, TOKENS, TOKEN_BYTES)]
    options = ["--mode", mode, *(["--stride", str(stride)] if stride else []), "--adapt_rate", str(adapt_rate)]
    try:
        figures: dict[str, Any] = json.loads(run_alone([*files, *options], folder))
    except ValueError as error:
        raise UserError(f"{SCRIPT} gave no score: {error}") from None
    return figures


def run_alone(command: Sequence[str], folder: Path) -> str:
    """Run a Python program in an isolated process; return what it prints. Raises ValueError, one line, if it fails.

    Isolated (python -I): no PYTHONPATH, no user site, not the current folder.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([sys.executable, "-I", *command], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise ValueError(said[-1].removeprefix("error: ") if said else f"it ended with status {done.returncode}")
    return done.stdout


def rescore_folder(
    folder: Path, raw_files: Sequence[str] = (), evaluation: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Score an exported folder again; return the figures, and how it differs from its ledger.

    Nothing of the folder is believed: score.py is run only if it is the program that hfgolf writes for the artifact,
    which files count is not the ledger's choice, and the text is what the tokens decode to. If something differs,
    nothing is scored, and the figures are empty.

    raw_files: the raw text (paths, globs or URLs), of which tokens, bytes and certificate must be. Without, they need
    only agree with each other: then the text is the folder's own word.

    evaluation: {"evaluation", "stride", "adapt_rate"} to score by; what is not there, or None, is that of the ledger,
    whose score must come out again if all three are.

    Raises UserError if there is no ledger, if files cannot be read, or for a stride of flat rows.
    """
    require_plain_files(folder)
    told = _read_told(folder)
    files = {folder / entry["name"]: tuple(entry["counted_by"]) for entry in told["files"]}
    try:
        ledger = read_ledger(files, told["count"], told["budget_bytes"])
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        return {}, [f"{folder}: a file of {LEDGER} cannot be read ({one_line(error)})."]
    problems = [
        f"{folder / found['name']} is not the file of the ledger: its sha256 or size differs."
        for entry, found in zip(told["files"], ledger["files"], strict=True)
        if (entry["bytes"], entry["sha256"]) != (found["bytes"], found["sha256"])
    ]
    if not problems:
        problem = budget_problem(ledger) or _program_problem(folder) or _text_problem(folder, raw_files)
        problems += [problem] if problem else []
    if problems:
        return {}, problems
    settings = {name: told["settings"].get(name, default) for name, default in EVALUATION.items()}
    used = settings | {name: value for name, value in (evaluation or {}).items() if value is not None}
    if used["evaluation"] == "flat" and (evaluation or {}).get("stride"):
        raise UserError("--stride needs --evaluation sliding or documents, but it is flat.")
    figures = rescore(folder, *used.values())
    if figures["sha256"] != told["weights_sha256"]:
        problems.append(f"{folder / ARTIFACT} decodes to other weights than the ledger states.")
    tolerance = _ADAPTED_TOLERANCE if settings["adapt_rate"] else _RELATIVE_TOLERANCE
    for name in ("nats", "tokens", "bytes", "bpb") if used == settings else ():
        stated = told["after"].get(name)
        if not (isinstance(stated, int | float) and math.isclose(figures[name], stated, rel_tol=tolerance)):
            problems.append(f"The score is {figures[name]} {name}, but the ledger states {stated}.")
    figures |= {
        "counted_bytes": ledger["totals"][told["count"]],
        "all_bytes": ledger["totals"]["everything"],
        "budget_bytes": told["budget_bytes"],
        "has_config": folder / CONFIG in files,
        "is_text_checked": bool(raw_files),
        "text_sha256": read_json(folder / CERTIFICATE)["sha256"],
    }
    return figures, problems


def require_plain_files(folder: Path) -> None:
    """Raise UserError for a link, or for what a read may wait on without end, such as a pipe."""
    for path in folder.glob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(
                f"{path} is a link, a pipe, a socket or a device, which no export writes; name a folder that `hfgolf"
                " golf export` wrote."
            )


def _read_told(folder: Path) -> dict[str, Any]:
    """Return ledger.json. Raises UserError for anything that no export writes."""
    told = read_json(folder / LEDGER)
    try:
        counted = {entry["name"]: tuple(entry["counted_by"]) for entry in told["files"]}
        mode, stride, rate = (told["settings"].get(name, default) for name, default in EVALUATION.items())
        is_valid = (
            told["count"] in COUNTS
            and type(told["budget_bytes"]) is int
            and isinstance(told["after"]["nats"], float)
            and isinstance(told["weights_sha256"], str)
            and mode in MODES
            and (stride is None or 0 < stride <= 2**24)
            and isinstance(rate, int | float)
            and 0 <= rate < 1
            and len(counted) == len(told["files"])
            and all(isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str) for entry in told["files"])
            and all(Path(name).name == name and not name.startswith(".") for name in counted)
            and counted.keys() | {CONFIG, UNPACK} >= _COUNTED_BY.keys()
            and all(counted_by == _COUNTED_BY.get(name, COUNTS) for name, counted_by in counted.items())
        )
    except (KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise UserError(f"{folder / LEDGER} is missing or broken; name a folder that `hfgolf golf export` wrote.")
    return told


def config_of(artifact: bytes) -> GolfConfig:
    """Return the config in an artifact. Raises ValueError, TypeError or RecursionError for one that is damaged.

    And ValueError for a model that this machine has no memory for: zeros take no bytes of an artifact.
    """
    fields = read_config(artifact)
    if not (isinstance(fields, dict) and fields.keys() <= defaults().keys()):
        raise ValueError("it is damaged: its config has unknown fields")
    config = GolfConfig(**fields)
    try:
        with torch.device("meta"):
            num_weights = sum(weight.numel() for weight in GolfNetwork(config).parameters())
    except (RuntimeError, TypeError):  # no tensor can be as large
        num_weights = 2**63
    require_memory(_BYTES_PER_WEIGHT * num_weights, "its weights")
    return config


def require_memory(num_bytes: int, what: str) -> None:
    """Raise ValueError if something takes more memory than is free."""
    if num_bytes > (free := free_memory_bytes(torch.device("cpu"))):
        raise ValueError(f"{what} would take {num_bytes / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free")


def _program_problem(folder: Path) -> str | None:
    """Return why score.py must not be run: it is not the program for the artifact. Runs nothing of the folder."""
    try:
        program = packed_script(config_of((folder / ARTIFACT).read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        return f"{folder / ARTIFACT}: {one_line(error)}."
    if (folder / SCRIPT).read_bytes() == program:
        return None
    return (
        f"{folder / SCRIPT} is not the program that this version of hfgolf writes for {ARTIFACT}, so it was not run;"
        " read it, and run it yourself if you trust it."
    )


def _text_problem(folder: Path, files: Sequence[str]) -> str | None:
    """Return how tokens, their bytes and the certificate differ from raw files; without these, from each other."""
    certificate = read_json(folder / CERTIFICATE)
    try:
        config = config_of((folder / ARTIFACT).read_bytes())
        tokenizer = read_tokenizer(folder, config)
        backend = tokenizer.backend_tokenizer
        tokens = np.fromfile(folder / TOKENS, "<u2" if config.vocab_size <= 2**16 else "<u4")
        token_bytes = np.fromfile(folder / TOKEN_BYTES, "<u2")
        spelled = entry_bytes(tokenizer)[tokens]
    except Exception as error:  # tokenizers raises plain Exceptions
        return f"{folder}: {TOKENIZER}, {TOKENS} and {TOKEN_BYTES} do not belong together ({one_line(error)[:200]})."
    if len(tokens) != len(token_bytes) or (token_bytes > spelled).any():
        return f"{folder / TOKEN_BYTES}: a token stands for more bytes than {TOKENIZER} spells."
    if files:
        return _raw_problem(folder, files, tokenizer, tokens, token_bytes, certificate)
    text = hashlib.sha256()  # of what the tokens spell, without what begins a document: the certificate's of all
    start = document_start(tokenizer)
    for document in np.split(tokens, np.flatnonzero(tokens == start[0])):
        ids = document.tolist()
        ids = ids[len(start) if ids[: len(start)] == start else 1 :]  # older versions: the separator alone
        text.update(backend.decode(ids, skip_special_tokens=False).encode())
    expected = {
        "num_tokens": len(tokens),
        "num_bytes": int(token_bytes.sum(dtype=np.int64)),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "sha256": str(certificate.get("sha256")) if adds_a_space(tokenizer) else text.hexdigest(),
    }
    wrong = [name for name, value in expected.items() if certificate.get(name) != value]
    return f"{folder / CERTIFICATE} is of another text: {', '.join(wrong)} differ." if wrong else None


def read_tokenizer(folder: Path, config: GolfConfig) -> PreTrainedTokenizerFast:
    """Return the tokenizer of an exported folder, whose model has a config. Raises whatever a damaged file leads to."""
    eos: Any = config.eos_token_id or 0
    backend = unpack_tokenizer((folder / TOKENIZER).read_bytes())
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=str(backend.id_to_token(eos)))


def _raw_problem(
    folder: Path,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    tokens: np.ndarray,
    token_bytes: np.ndarray,
    certificate: Mapping[str, Any],
) -> str | None:
    """Return how the tokens of a folder, their bytes and its certificate differ from those of raw files."""
    with tempfile.TemporaryDirectory() as cache:
        corpus, encoded = tokenize_files([*files], tokenizer, embedding_rows(tokenizer), "text", Path(cache))
        stream = encoded.val
        num_tokens = max(2, len(stream.tokens))  # a tokenizer that makes nothing of a text gets no certificate
        plan = plan_windows("flat", num_tokens, min(1024, num_tokens - 1))
        raw = certify(corpus, encoded, plan, searched=None)
        if not raw.holds:
            return f"--files: {raw.line}"
        if any(certificate.get(name) != raw.facts[name] for name in ("documents", "sha256", "num_bytes")):
            told = str(certificate.get("documents"))
            count = sum(str(document) in told for document in raw.facts["documents"])
            return (
                f"--files: {folder / CERTIFICATE} is of another text: of {certificate.get('num_bytes')} bytes, but this"
                f" has {raw.facts['num_bytes']}, and {count} of its"
                f" {count_of(raw.facts['num_documents'], 'document')} are in it; name exactly the text that was scored,"
                " in its order."
            )
        is_same = np.array_equal(stream.tokens, tokens)
        if is_same and np.array_equal(bytes_per_token(stream, encoded.tokenizer), token_bytes):
            return None
        return f"{folder / TOKENS} or {TOKEN_BYTES} is not what {TOKENIZER} makes of --files."
