"""Does the autopilot choose well? In a folder of its own, and then with a process per core:

    python benchmarks/law/proof.py --texts prose200k hfgolf1m packages20m --minutes 1 3 10
    python benchmarks/law/proof.py --train 1 2

The first command writes each text, lets `hfgolf train TEXT --minutes N` choose, and makes a grid of twelve around it:
two thirds and one and a half of its width, the next vocabularies, alone and together, with the rates that go with them;
both rates times 0.7 and 1.4; dropout; six tenths of the steps. And configs/small.yaml, and if the choice ends before
the minutes do, a longer training, and if there is time another model that the choice teaches, as `hfgolf train` does.
Each gets as many steps as the minutes have on a machine whose steps take 28.6 ms and their FLOPs at 320 GFLOP/s, as
about on two cores of an AMD EPYC with AVX512-BF16: steps that are timed here and now would depend on what else the
machine does.

The second command trains them, one thread each, adds a row for each to proof.jsonl beside this file, and prints how far
they are from the choice, in nats per byte and per token of the choice. Rows whose names say what they are, as in
"4 x 192, 512 entries, steps of 4,096", are others that were tried.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import io
import itertools
import json
import math
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import unicodedata
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch

from hfgolf import api
from hfgolf.config.parse import AUTOPILOT, DISTILL_FROM, load_config
from hfgolf.config.sections import RunConfig
from hfgolf.train import autopilot
from hfgolf.train.autopilot import EVALUATIONS, SHARE_OF_STEPS, VOCABULARIES, choose
from hfgolf.train.decisions import decide
from hfgolf.train.law import Shape, decay_of, heads_of, layers_of, rates_of
from hfgolf.train.successor import has_time_to_teach, steps_of_taught

sys.path.append(str(Path(__file__).parents[1]))
from jobs import do_unclaimed, rows_of, series_of

ROWS = Path(__file__).parent / "proof.jsonl"
JOBS = Path("proof_jobs.jsonl")
CHOICE, SMALL, SHORTER, LONGER, TAUGHT = "choice", "small", "shorter", "longer", "taught"
FIXED_SECONDS, FLOPS = 0.0286, 320e9  # of a step
RECORDED = tuple(key for key in AUTOPILOT if key != "train.eval_every_steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=[], help="write these, choose and time")
    parser.add_argument("--minutes", nargs="+", type=float, default=[1.0])
    parser.add_argument("--train", nargs="+", type=int, metavar="SEED", help="train what was chosen, with these seeds")
    arguments = parser.parse_args()
    for text in map(write_text, arguments.texts):
        for minutes in arguments.minutes:
            with JOBS.open("a") as file:
                file.writelines(json.dumps(job) + "\n" for job in jobs_of(text, minutes))
    if arguments.train:
        jobs = (
            (f"{Path(job['text']).stem}-{job['minutes']:g}-{job['name']}-{seed}", partial(train, job, seed))
            for seed, job in itertools.product(arguments.train, rows_of(JOBS))
        )
        do_unclaimed(jobs, Path("proof_claims"), ROWS)
    for title, found in series_of(ROWS, _title).items():
        report(title, found)


def _title(row: dict[str, Any]) -> str:
    return f"{row['text']}, {row['sha256']}, {row['machine']}, {row['minutes']:g} min"


def write_text(name: str) -> Path:
    """Write a text and return its file, NAME-SHA256.txt, whose place no other text takes."""
    content = TEXTS[name]().encode()
    path = Path(f"{name}-{hashlib.sha256(content).hexdigest()[:12]}.txt")
    path.write_bytes(content)
    return path


def german_prose() -> str:
    """Return 200,000 characters of dpkg's German manual pages, each paragraph once: 1.21.22 in Debian 12.11."""
    paths = sorted(Path("/usr/share/man/de/man1").glob("dpkg*.gz"))
    pages = [gzip.decompress(path.read_bytes()).decode() for path in paths]
    if not pages:
        raise SystemExit("prose200k: no /usr/share/man/de/man1/dpkg*.gz; install dpkg-dev with German manual pages.")
    text = "\n".join(dict.fromkeys(line for line in "\n".join(pages).split("\n") if line[:1] not in (".", "'")))
    for pattern, plain in ROFF.items():
        text = re.sub(pattern, plain, text)
    return unicodedata.normalize("NFC", text)[:200_000]


def own_source() -> str:
    """Return the first million characters of this project's Python files at COMMIT."""
    archive = ["git", "archive", COMMIT, "hfgolf", "tests"]
    packed = subprocess.run(archive, cwd=Path(__file__).parents[2], check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as members:
        files = sorted((member for member in members if member.name.endswith(".py")), key=lambda member: member.name)
        texts = [found.read().decode() for file in files if (found := members.extractfile(file))]
    return "\n".join(texts)[:1_000_000]


def docstrings() -> str:
    """Return the docstrings of Python's standard library, 1.8 MB: the text of examples/train_on_your_text.ipynb."""
    library, found = Path(sysconfig.get_path("stdlib")), list[str]()
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"}.isdisjoint(path.relative_to(library).parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    found.append(ast.get_docstring(node) or "")
    return "\n\n".join(filter(None, found))


def package_source(characters: int = 20_000_000) -> str:
    """Return so many characters of Python files: the first half from torch, the second from transformers."""
    texts = []
    for package in ("torch", "transformers"):
        files = sorted(Path(str(distribution(package).locate_file(package))).rglob("*.py"))
        texts.append("\n".join(path.read_text() for path in files)[: characters // 2])
    return "\n".join(texts)


def repetitive(name: str) -> str:
    """Return text that a program wrote: the log of a server, a table of measurements, or rows of JSON."""
    rng, people = random.Random(1), ["Anna", "Ben", "Carla", "David", "Eva", "Felix", "Greta", "Hugo"]
    words = ["red", "blue", "shoes", "lamp", "table", "chair", "book", "phone", "cable", "garden", "window", "paint"]
    paths = "/ /index.html /login /api/items /api/items/%d /static/app.js /static/style.css /favicon.ico /search?q=%s"
    chrome = (
        "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/128.0 Safari/537.36"
    )
    agents = ["Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/130.0", chrome, "curl/8.5.0"]
    time, size = datetime(2026, 3, 1), 0
    log, table, values = list[str](), ["time,temperature,pressure,voltage\n"], [20.0, 1000.0]
    while size < 3_000_000:
        time += timedelta(seconds=rng.expovariate(1))
        path = rng.choices(paths.split(), [9, 5, 3, 6, 8, 9, 7, 4, 5])[0]
        path = path.replace("%d", str(rng.randrange(500))) if "%d" in path else path
        path = path.replace("%s", rng.choice(words)) if "%s" in path else path
        address = f"10.{rng.randrange(4)}.{rng.randrange(256)}.{rng.randrange(256)}"
        request = f"{rng.choices(['GET', 'POST'], [9, 1])[0]} {path} HTTP/1.1"
        status = f"{rng.choices([200, 304, 404, 500], [80, 15, 4, 1])[0]} {rng.randrange(200, 20000)}"
        line = f'{address} - - [{time:%d/%b/%Y:%H:%M:%S} +0000] "{request}" {status} "-" "{rng.choice(agents)}"\n'
        log.append(line)
        size += len(line)
    for minute in range(60_000):
        values = [values[0] + rng.gauss(0, 0.1), values[1] + rng.gauss(0, 0.3)]
        table.append(f"{minute * 60},{values[0]:.2f},{values[1]:.1f},{230 + rng.gauss(0, 1):.2f}\n")
    if name != "json2m":
        return "".join(log if name == "log3m" else table)

    def row(number: int) -> dict[str, Any]:
        person = {"id": number, "name": rng.choice(people), "email": f"user{rng.randrange(10**5)}@example.com"}
        person |= {"active": rng.random() < 0.7, "score": round(rng.random() * 100, 2), "tags": rng.sample(words, 3)}
        street = f"{rng.choice(words).title()} Street {rng.randrange(1, 200)}"
        return person | {"address": {"street": street, "zip": f"{rng.randrange(10000, 99999)}"}}

    return "\n".join(json.dumps(row(number)) for number in range(10_000))


TEXTS: dict[str, Callable[[], str]] = {
    "prose200k": german_prose,
    "hfgolf1m": own_source,
    "docstrings2m": docstrings,
    "packages20m": package_source,
    **{name: partial(repetitive, name) for name in ("log3m", "numbers1m", "json2m")},
}
COMMIT = "c1c7913c"
ROFF = {
    r"\\\(:(.)": "\\1\u0308",
    r"\\\(ss": "ß",
    r"\\\([BFblcro][qco]": '"',
    r"\\(f\(..|f.|s[+-]?\d|\*\(..|[&|])": "",
    r"\\(-|\\)": r"\1",
}
"""What manual pages write for characters, and for fonts."""


def neighbors(chosen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {name: values that are stated} of the runs around a choice."""
    is_byte = chosen["tokenizer.kind"] == "byte"
    width, vocabulary = chosen["model.hidden_size"], 256 if is_byte else chosen["tokenizer.vocab_size"]
    stay = dict(chosen)
    widths = {sign: 32 * round(factor * width / 32) for sign, factor in (("-", 2 / 3), ("+", 1.5))}
    vocabularies = _beside((256, *VOCABULARIES), vocabulary)
    grid: dict[str, dict[str, Any]] = {}
    is_averaged = chosen["optim.ema_export"]
    of_widths = {f"width{sign}": _width(value, is_averaged) for sign, value in widths.items()}
    for at, of_width in {"": {}, **of_widths}.items():
        for kind, of_words in {"": {}, **{f"vocabulary{s}": _vocabulary(v) for s, v in vocabularies.items()}}.items():
            if at or kind:
                grid["".join((at, kind))] = stay | of_width | of_words
    rates = ("optim.learning_rate", "optim.adamw_learning_rate")
    for name, factor in (("rates-", 0.7), ("rates+", 1.4)):
        grid[name] = stay | {key: factor * chosen[key] for key in rates}
    grid["dropout"] = stay | {"model.dropout": 0.1}
    grid[SHORTER] = stay
    if chosen["train.max_tokens"] is not None:
        grid |= {LONGER: stay, TAUGHT: stay}
    grid[SMALL] = _width(256) | _vocabulary(4096) | {"train.max_tokens": None}
    grid[SMALL] |= {"batch.tokens_per_step": 2048, "optim.ema_decay": None, "optim.ema_export": False}
    return grid


def _beside(values: tuple[int, ...], value: int) -> dict[str, int]:
    """Return {"-": the value before, "+": the value after}, as far as there are any."""
    place = values.index(value)
    return {sign: values[i] for sign, i in (("-", place - 1), ("+", place + 1)) if 0 <= i < len(values)}


def _width(width: int, is_averaged: bool = False) -> dict[str, Any]:
    muon, adamw = rates_of(width, is_averaged)
    shape = {"hidden_size": width, "num_hidden_layers": layers_of(width), "num_attention_heads": heads_of(width)}
    rates = {"optim.learning_rate": muon, "optim.adamw_learning_rate": adamw}
    return {f"model.{key}": value for key, value in shape.items()} | rates


def _vocabulary(entries: int) -> dict[str, Any]:
    is_byte = entries == 256
    return {"tokenizer.kind": "byte" if is_byte else "bpe", "tokenizer.vocab_size": "auto" if is_byte else entries}


def jobs_of(text: Path, minutes: float) -> list[dict[str, Any]]:
    """Return the runs for a text and minutes, each with the steps that it makes in them by the time of its step."""
    autopilot.seconds_per_step = seconds_per_step
    decisions = decide(load_config([str(text)], values={"train.max_minutes": minutes}), {})
    chosen = choose(decisions, torch.device("cpu"), 1, may_teach=True).values
    choice = {key: chosen[key.replace(".", "__")] for key in RECORDED}
    machine = f"assumed: {1000 * FIXED_SECONDS:g} ms and {FLOPS / 1e9:g} GFLOP/s"
    jobs = []
    for name, values in {CHOICE: choice, **neighbors(choice)}.items():
        config = decisions.config.replace(**{key.replace(".", "__"): value for key, value in values.items()})
        seconds = seconds_per_step(config, 256 if config.tokenizer.kind == "byte" else config.tokenizer.max_vocab_size)
        steps = whole = round(SHARE_OF_STEPS * 60 * minutes / seconds)
        if (most := values["train.max_tokens"]) is not None:
            steps = min(steps, round(most / config.batch.tokens_per_step))
        if name == TAUGHT and not has_time_to_teach(steps * seconds, SHARE_OF_STEPS * minutes):
            continue
        steps = {SHORTER: round(0.6 * steps), LONGER: min(whole, round(steps / 0.6))}.get(name, steps)
        limits: dict[str, Any] = {"train.max_tokens": None, "train.max_steps": steps}
        if values["optim.ema_export"]:
            limits["optim.ema_decay"] = decay_of(steps)
        job = {"text": str(text), "minutes": minutes, "name": name, "machine": machine, "seconds": seconds}
        jobs.append(job | {"values": values | limits})
    return jobs


def seconds_per_step(
    config: RunConfig, vocabulary: int, device: torch.device | None = None, num_processes: int = 1
) -> float:
    """Return the seconds of a step on the machine that is assumed, whatever this one is."""
    shape = Shape(config.model.hidden_size, config.model.num_hidden_layers, vocabulary)
    flops = config.batch.tokens_per_step * shape.flops_per_token(config.batch.sequence_length)
    return FIXED_SECONDS + flops / FLOPS


def train(job: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a job with what it reached."""
    steps = job["values"]["train.max_steps"]
    with tempfile.TemporaryDirectory() as folder:
        stated = job["values"] | {
            "run.seed": seed,
            "run.output_dir": folder,
            "run.name": "run",
            "train.eval_every_steps": max(1, round(steps / EVALUATIONS)),
            "train.final_eval_tokens": None,
            "train.sample_tokens": None,
            "train.cpu_threads": 1,
            "train.compile": False,
        }
        summary = api.train(load_config([job["text"]], values=stated))
        if job["name"] == TAUGHT:
            steps = steps_of_taught(steps, steps * job["seconds"], SHARE_OF_STEPS * job["minutes"])
            values: dict[str, Any] = {DISTILL_FROM: [str(Path(folder, "run"))]}
            values |= {"run.output_dir": folder, "run.name": TAUGHT}
            values |= {"train.max_steps": steps, "optim.ema_decay": stated["optim.ema_decay"] and decay_of(steps)}
            summary = api.train(load_config([], values=values))
    reached = {"seed": seed, "bits_per_byte": summary["val_bits_per_byte"], "val_loss": summary["val_loss"]}
    text, sha256 = Path(job["text"]).stem.split("-")
    return job | reached | {"text": text, "sha256": sha256}


def report(title: str, runs: list[dict[str, Any]]) -> None:
    """Print the means over the seeds, best first."""
    found: dict[str, list[float]] = {}
    nats_per_bit = 0.0
    for row in runs:
        found.setdefault(row["name"], []).append(row["bits_per_byte"])
        if row["name"] == CHOICE:
            nats_per_bit = row["val_loss"] / row["bits_per_byte"]
    means = {name: sum(values) / len(values) for name, values in found.items()}
    chosen = means.get(CHOICE, math.nan)
    print(f"{title}: {chosen:.4f} bits per byte")
    for name, mean in sorted(means.items(), key=lambda item: item[1]):
        bits, seeds = mean - chosen, len(found[name])
        print(
            f"  {name:22} {mean:.4f}, {bits * math.log(2):+.4f} nats per byte,"
            f" {bits * nats_per_bit:+.4f} per token ({seeds} seeds)"
        )


if __name__ == "__main__":
    main()
