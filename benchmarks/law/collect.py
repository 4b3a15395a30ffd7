"""Collect the runs that the autopilot's law is fitted to: python benchmarks/law/collect.py --shakespeare input.txt

Trains small models on seven texts, from Python's own files and from tinyshakespeare, of 200 kB to 12 MB:
vocabularies of 256 to 4,096 entries, widths of 64 to 384, a part of an epoch to 48 epochs, dropout of 0 to 0.3. Adds a
row for each run to runs.jsonl beside this file. Each process takes the next run that nobody has taken, so start one per
core; each uses one thread. All of it takes about 7 hours of one core. Then fit.py makes the law of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

from hfgolf import api
from hfgolf.config.parse import load_config
from hfgolf.run.metrics import read_rows
from hfgolf.train.law import Shape, rates_of

RUNS = Path(__file__).parent / "runs.jsonl"
LAYERS = {64: 2, 96: 3, 128: 3, 192: 4, 256: 5, 384: 6}
HEADS = {64: 2, 96: 3, 128: 4, 192: 6, 256: 4, 384: 6}
BYTES_PER_TOKEN = {256: 1.0, 512: 1.65, 1024: 2.1, 2048: 2.55, 4096: 3.0}  # about, to plan the runs
EPOCHS = (0.125, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
SEQUENCE_LENGTH, TOKENS_PER_STEP, RUNS_PER_TEXT = 256, 2048, 36


@dataclass(frozen=True)
class Cell:
    """One run of the collection."""

    flops: float
    text: str
    vocabulary: int
    width: int
    dropout: float

    @property
    def steps(self) -> int:
        shape = Shape(self.width, LAYERS[self.width], self.vocabulary)
        return round(self.flops / shape.flops_per_token(SEQUENCE_LENGTH) / TOKENS_PER_STEP)

    @property
    def name(self) -> str:
        return f"{self.text}-v{self.vocabulary}-w{self.width}-C{self.flops:.1e}-d{self.dropout}".replace("+", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shakespeare", type=Path, required=True, help="the text tinyshakespeare")
    parser.add_argument("--folder", type=Path, default=Path("law"), help="for the texts and the runs (law)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    claims = arguments.folder / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    sizes = write_texts(arguments.folder, arguments.shakespeare)
    done = {json.loads(line)["name"] for line in RUNS.read_text().splitlines()} if RUNS.exists() else set()
    for cell in cells(sizes):
        try:
            (claims / cell.name).touch(exist_ok=False)
        except FileExistsError:
            continue
        if cell.name not in done:
            with RUNS.open("a") as file:
                file.write(json.dumps(train(cell, arguments.folder)) + "\n")


def cells(sizes: dict[str, int]) -> Iterator[Cell]:
    """Yield the runs, one of each text in turn, so that a part of the collection is a smaller collection.

    sizes: {text: bytes to train on}.
    """
    rng, by_text = random.Random(2), []
    for text, num_bytes in sizes.items():
        mine: list[Cell] = []
        while len(mine) < RUNS_PER_TEXT:
            width = rng.choice([64, 96, 128, 128, 192, 192, 256, 256, 384])
            vocabulary, epochs = rng.choice([256, 512, 1024, 1024, 2048, 4096]), rng.choice(EPOCHS)
            tokens = epochs * num_bytes / BYTES_PER_TOKEN[vocabulary]
            flops = tokens * Shape(width, LAYERS[width], vocabulary).flops_per_token(SEQUENCE_LENGTH)
            is_possible = 1e12 <= flops <= 3e13 and 50 <= tokens / TOKENS_PER_STEP <= 9000
            if not is_possible or (vocabulary == 4096 and num_bytes < 900_000):
                continue
            if epochs > 12 and rng.random() < 0.5:
                continue
            cell = Cell(flops, text, vocabulary, width, 0.0 if epochs <= 3 else rng.choice([0.0, 0.1, 0.2, 0.3]))
            like = [other for other in mine if asdict(other) | {"flops": 0} == asdict(cell) | {"flops": 0}]
            if not any(abs(flops / other.flops - 1) < 0.3 for other in like):
                mine.append(cell)
        by_text.append(mine)
    for group in zip(*by_text, strict=True):
        yield from group


def train(cell: Cell, folder: Path) -> dict[str, object]:
    """Train one run and return its row: losses at its end, at its best step, and in between."""
    muon, adamw = rates_of(cell.width)
    is_byte = cell.vocabulary == 256
    values = {
        "run.name": cell.name,
        "run.output_dir": folder / "runs",
        "data.cache_dir": folder / "cache",
        "data.source": "files",
        "data.files": [str(folder / f"{cell.text}.train.txt")],
        "data.val_files": [str(folder / f"{cell.text}.val.txt")],
        "tokenizer.kind": "byte" if is_byte else "bpe",
        "tokenizer.vocab_size": "auto" if is_byte else cell.vocabulary,
        "model.hidden_size": cell.width,
        "model.num_hidden_layers": LAYERS[cell.width],
        "model.num_attention_heads": HEADS[cell.width],
        "model.dropout": cell.dropout,
        "batch.tokens_per_step": TOKENS_PER_STEP,
        "optim.learning_rate": round(muon, 5),
        "optim.adamw_learning_rate": round(adamw, 5),
        "train.max_steps": cell.steps,
        "train.eval_every_steps": max(50, cell.steps // 8),
        "train.eval_tokens": 20_000,
        "train.cpu_threads": 1,
        "train.compile": False,
        "train.mixed_precision": "bf16",
        "train.sample_tokens": None,
    }
    summary = api.train(load_config(["--config=small"], values=values))
    run = folder / "runs" / cell.name
    rows = [row for row in read_rows(run / "metrics.jsonl") if row.get("val_loss") is not None]
    shutil.rmtree(run)
    return {
        "name": cell.name,
        **asdict(cell),
        "layers": LAYERS[cell.width],
        "steps": cell.steps,
        "tokens": summary["tokens"],
        "epochs": rows[-1]["epoch"],
        "val_loss": rows[-1]["val_loss"],
        "bits_per_byte": rows[-1]["val_bits_per_byte"],
        "best_bits_per_byte": summary["val_bits_per_byte"],
        "curve": [[row["step"], row.get("subset_val_loss", row["val_loss"])] for row in rows],
    }


def write_texts(folder: Path, shakespeare: Path) -> dict[str, int]:
    """Write the texts, each as NAME.train.txt and NAME.val.txt, and return {name: bytes to train on}."""
    rng = random.Random(0)

    def shuffled(text: str, size: int) -> list[str]:
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        rng.shuffle(parts)
        return parts

    text = shakespeare.read_text()
    text = text[: len(text) * 9 // 10]  # the last tenth judges recipes elsewhere
    ends = len(text) * 9 // 10
    texts = {
        "shakespeare": (text[:ends], text[ends:]),
        "shakespeare200": (text[len(text) // 2 : len(text) // 2 + 200_000], text[ends:]),
    }
    text = "\n\n".join(topics[name] for name in sorted(topics))
    texts["topics"] = (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :])
    for name, source, size, held_out, few in (
        ("docstrings", "\n\n".join(dict.fromkeys(docstrings())), 5000, None, ("docstrings200", 40)),
        ("python", standard_library(), 20_000, 15, ("python1m", 50)),
    ):
        parts = shuffled(source, size)
        count = held_out or len(parts) // 10
        texts[name] = ("\n\n".join(parts[count:]), "\n\n".join(parts[:count]))
        texts[few[0]] = ("\n\n".join(parts[count : count + few[1]]), "\n\n".join(parts[:count]))
    for name, (train_text, val_text) in texts.items():
        (folder / f"{name}.train.txt").write_text(train_text)
        (folder / f"{name}.val.txt").write_text(val_text)
    return {name: len(train_text.encode()) for name, (train_text, _) in texts.items()}


def standard_library() -> str:
    """Return the source of Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not {"site-packages", "test", "lib2to3"} & {*path.parts}]
    return "\n".join(filter(None, map(_read, paths)))


def docstrings() -> Iterator[str]:
    """Yield the longer docstrings of the standard library: English with code in it."""
    warnings.simplefilter("ignore")
    root = Path(sysconfig.get_paths()["stdlib"])
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            tree = ast.parse(_read(path))
        except (SyntaxError, ValueError):
            continue
        found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        yield from (text for text in found if text and len(text) > 300)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError):
        return ""


if __name__ == "__main__":
    main()
