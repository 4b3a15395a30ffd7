"""Run score.py on the bytes on disk, in a process that sees nothing of hfgolf, and compare with what a ledger says.

Owns the names of an export's files. Does not know how they were made.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hfgolf.data.tokenizer import entry_bytes, tokenizer_sha256
from hfgolf.evaluate.token_bytes import adds_a_space
from hfgolf.evaluate.windows import MODES
from hfgolf.golf.budget import CONFIG, COUNTS, SCRIPT, TOKENIZER, Entry, read_ledger
from hfgolf.golf.decoder import read_config
from hfgolf.golf.script import defaults, packed_script
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.run.record import read_json
from hfgolf.system.errors import UserError
from hfgolf.system.wording import one_line

ARTIFACT, TOKENS, TOKEN_BYTES, LEDGER = "artifact.bin", "tokens.bin", "bytes.bin", "ledger.json"
CERTIFICATE = "certificate.json"
_COUNTED_BY = {
    **{ARTIFACT: COUNTS, SCRIPT: COUNTS, TOKENIZER: COUNTS[1:], CONFIG: COUNTS[1:]},
    **{TOKENS: (), TOKEN_BYTES: ()},
}
_MAX_TOKENIZER_BYTES = 2**28  # a larger one is a bomb
_RELATIVE_TOLERANCE = 1e-6  # of nats: another machine, or another number of threads, adds in another order


def rescore(folder: Path, mode: str = "flat", stride: int | None = None) -> dict[str, Any]:
    """Return what score.py prints: nats, tokens, bytes, bpb, the sha256 of the weights, and the coverage.

    The process is isolated (python -I): no PYTHONPATH, no user site, not the current folder. Raises UserError with the
    program's own words if it refuses the files.
    """
    files = [str((folder / name).resolve()) for name in (SCRIPT, ARTIFACT, TOKENS, TOKEN_BYTES)]
    options = ["--mode", mode, *(["--stride", str(stride)] if stride else [])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-I", *files, *options], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        reason = said[-1].removeprefix("error: ") if said else f"it ended with status {done.returncode}"
        raise UserError(f"{SCRIPT} gave no score: {reason}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def rescore_folder(
    folder: Path, mode: str | None = None, stride: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Score an exported folder again; return the figures, and how it differs from its ledger.

    mode, stride: of the evaluation; None: those of the ledger, whose score must then come out again. Nothing of the
    folder is believed: score.py is run only if it is the program that hfgolf writes for the artifact, which files count
    is not the ledger's choice, and the text is what the tokens decode to. If something differs, nothing is scored, and
    the figures are empty. Raises UserError if there is no ledger.
    """
    told = _read_ledger(folder)
    settings, entries = told["settings"], told["entries"]
    for path in (folder / entry.name for entry in entries):
        if path.is_symlink():
            return {}, [f"{path} is a link, which no export writes."]
    try:
        ledger = read_ledger({folder / e.name: e.counted_by for e in entries}, told["count"], told["budget_bytes"])
    except OSError as error:
        return {}, [f"{error.filename} cannot be read ({error.strerror})."]
    problems = [
        f"{folder / new.name} is not the file of the ledger: its sha256 differs."
        for old, new in zip(entries, ledger.entries, strict=True)
        if old != new
    ]
    problem = None if problems else ledger.problem or _program_problem(folder) or _text_problem(folder)
    problems += [problem] if problem else []
    if problems:
        return {}, problems
    if mode is None:
        mode, stride = settings["mode"], stride or settings["stride"]
    figures = rescore(folder, mode, stride)
    if figures["sha256"] != told["weights_sha256"]:
        problems.append(f"{folder / ARTIFACT} decodes to other weights than the ledger states.")
    if {"mode": mode, "stride": stride} == settings and not math.isclose(
        figures["nats"], told["nats"], rel_tol=_RELATIVE_TOLERANCE
    ):
        problems.append(f"The score is {figures['nats']} nats, but the ledger states {told['nats']}.")
    return figures | {"counted_bytes": ledger.total(ledger.count), "budget_bytes": told["budget_bytes"]}, problems


def _read_ledger(folder: Path) -> dict[str, Any]:
    """Return what is needed of ledger.json. Raises UserError for anything that no export writes."""
    told = read_json(folder / LEDGER)
    try:
        settings = {"mode": told["settings"]["mode"], "stride": told["settings"]["stride"]}
        read = {
            "entries": [Entry(e["name"], e["bytes"], e["sha256"], tuple(e["counted_by"])) for e in told["files"]],
            "settings": settings,
            "nats": told["after"]["nats"],
            **{name: told[name] for name in ("count", "budget_bytes", "weights_sha256")},
        }
        counted = {entry.name: entry.counted_by for entry in read["entries"]}
        is_valid = (
            read["count"] in COUNTS
            and type(read["budget_bytes"]) is int
            and isinstance(read["nats"], float)
            and settings["mode"] in MODES
            and (settings["stride"] is None or 0 < settings["stride"] <= 2**24)
            and len(counted) == len(read["entries"])
            and all(Path(name).name == name and not name.startswith(".") for name in counted)
            and counted.keys() | {CONFIG} >= _COUNTED_BY.keys()
            and all(counted_by == _COUNTED_BY.get(name, COUNTS) for name, counted_by in counted.items())
        )
    except (KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise UserError(f"{folder / LEDGER} is missing or broken; name a folder that `hfgolf golf export` wrote.")
    return read


def _program_problem(folder: Path) -> str | None:
    """Return why score.py must not be run: it is not the program for the artifact. Runs nothing of the folder."""
    try:
        fields = read_config((folder / ARTIFACT).read_bytes())
        if not (isinstance(fields, dict) and fields.keys() <= defaults().keys()):
            raise ValueError("it is damaged: its config has unknown fields")
        program = packed_script(GolfConfig(**fields))
    except (ValueError, TypeError, RecursionError) as error:
        return f"{folder / ARTIFACT}: {one_line(error)}."
    if (folder / SCRIPT).read_bytes() == program:
        return None
    return (
        f"{folder / SCRIPT} is not the program that this version of hfgolf writes for {ARTIFACT}, so it was not run;"
        " read it, and run it yourself if you trust it."
    )


def _text_problem(folder: Path) -> str | None:
    """Return how the bytes of the tokens differ from the text that they spell, or from the certificate's."""
    certificate = read_json(folder / CERTIFICATE)
    eos = read_config((folder / ARTIFACT).read_bytes()).get("eos_token_id", GolfConfig.eos_token_id or 0)
    try:
        packed = lzma.LZMADecompressor().decompress((folder / TOKENIZER).read_bytes(), _MAX_TOKENIZER_BYTES)
        backend = Tokenizer.from_str(packed.decode())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=str(backend.id_to_token(eos)))
        tokens = np.fromfile(folder / TOKENS, "<u2" if len(tokenizer) <= 2**16 else "<u4")
        token_bytes = np.fromfile(folder / TOKEN_BYTES, "<u2")
        spelled = entry_bytes(tokenizer)[tokens]
    except Exception as error:  # tokenizers raises plain Exceptions
        return f"{folder}: {TOKENIZER}, {TOKENS} and {TOKEN_BYTES} do not belong together ({one_line(error)[:200]})."
    if len(tokens) != len(token_bytes) or (token_bytes > spelled).any():
        return f"{folder / TOKEN_BYTES}: a token stands for more bytes than {TOKENIZER} spells."
    expected = {
        "num_tokens": len(tokens),
        "num_bytes": int(token_bytes.sum(dtype=np.int64)),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "sha256": certificate.get("sha256") if adds_a_space(tokenizer) else _text_sha256(tokens, tokenizer),
    }
    wrong = [name for name, value in expected.items() if certificate.get(name) != value]
    return f"{folder / CERTIFICATE} is of another text: {', '.join(wrong)} differ." if wrong else None


def _text_sha256(tokens: NDArray[np.integer], tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the SHA-256 of what the tokens spell, without separators: the certificate's of all documents."""
    digest = hashlib.sha256()
    for document in np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_token_id)):
        ids = document[document != tokenizer.eos_token_id].tolist()
        digest.update(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False).encode())
    return digest.hexdigest()
