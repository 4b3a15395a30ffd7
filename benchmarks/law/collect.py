"""Collect the runs that the autopilot's law is fitted to: python benchmarks/law/collect.py --shakespeare input.txt

Trains CELLS: small models on seven texts, from Python's own files and from tinyshakespeare, of 200 kB to 12 MB. Adds a
row for each run to runs.jsonl beside this file. Each process takes the next run that nobody has taken, so start one per
core; each uses one thread. All of it takes about four hours of two cores. Then fit.py makes the law of them.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

from hfgolf import api
from hfgolf.config.parse import load_config
from hfgolf.data.tokenizer import tokens_per_byte
from hfgolf.run.metrics import read_rows
from hfgolf.train.autopilot import density, values_of_repeats
from hfgolf.train.law import Shape, heads_of, layers_of, rates_of

sys.path.append(str(Path(__file__).parents[1]))
from jobs import do_unclaimed, rows_of

RUNS = Path(__file__).parent / "runs.jsonl"
CELLS = """
    3e12   shakespeare python              96/1024 128/1024 128/2048
    3e12   shakespeare python              128/1024x1024 128/2048x1024
    1e13   python shakespeare docstrings   128/1024 128/2048 192/2048 256/4096 192/4096 128/4096 256/2048 192/1024
    2.5e12 shakespeare200 topics docstrings200 128/512
    5e12   shakespeare200                  128/1024 128/512 192/512
    6e12   topics docstrings200            192/512
    1e13   topics docstrings200            128/512 192/512 192/1024
    1e13   shakespeare200 topics docstrings200 256/512
    1e13   python1m                        128/1024 192/2048 256/4096
    1e13   python shakespeare              128/1024s128 128/1024s512 128/1024l2 128/1024l4 128/1024l6
    1e13   python docstrings               192/2048l2 192/2048l3
    2e13   python1m shakespeare            192/1024x4096 192/512x4096
    3e13   python docstrings               192/2048 256/4096x4096 256/2048
    3e13   python1m                        192/1024x4096 256/1024x4096
    3e13   python                          128/1024 192/1024x4096
    3e13   shakespeare                     192/2048 256/1024x4096
    3e13   docstrings                      256/2048l3
    3e13   docstrings                      192/1024x4096
    3e13   python1m docstrings             192/512x4096
    5e13   docstrings                      192/1024x4096
    5e13   docstrings python1m             256/2048
    1e14   python                          128/2048x4096 256/4096x4096 192/2048x4096
"""
"""Each line: FLOPs, texts, and runs: WIDTH/VOCABULARY, xTOKENS of a step (2,048), sLENGTH of a sequence (256), lLAYERS
(law.py's).
"""
RUN = r"(\d+)/(\d+)(?:x(\d+))?(?:s(\d+))?(?:l(\d+))?"


@dataclass(frozen=True)
class Cell:
    """One run of the collection."""

    flops: float
    text: str
    vocabulary: int
    width: int
    tokens_per_step: int
    sequence_length: int
    layers: int

    @property
    def steps(self) -> int:
        shape = Shape(self.width, self.layers, self.vocabulary)
        return round(self.flops / shape.flops_per_token(self.sequence_length) / self.tokens_per_step)

    @property
    def name(self) -> str:
        rest = f"x{self.tokens_per_step}-s{self.sequence_length}-l{self.layers}"
        return f"{self.text}-v{self.vocabulary}-w{self.width}-C{self.flops:.1e}-{rest}".replace("+", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shakespeare", type=Path, required=True, help="the text tinyshakespeare")
    parser.add_argument("--folder", type=Path, default=Path("law"), help="for the texts and the runs (law)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_texts(arguments.folder, arguments.shakespeare)
    done = {row["name"] for row in rows_of(RUNS)}
    jobs = ((cell.name, partial(train, cell, arguments.folder)) for cell in cells() if cell.name not in done)
    do_unclaimed(jobs, arguments.folder / "claims", RUNS)


def cells() -> Iterator[Cell]:
    for line in CELLS.split("\n")[1:-1]:
        flops, *words = line.split()
        texts = [word for word in words if word[0].isalpha()]
        for run in words[len(texts) :]:
            width, vocabulary, step, length, layers = (int(n or 0) for n in re.findall(RUN, run)[0])
            shape = length or 256, layers or layers_of(width)
            for text in texts:
                yield Cell(float(flops), text, vocabulary, width, step or 2048, *shape)


def train(cell: Cell, folder: Path) -> dict[str, object]:
    """Train one run and return its row: losses at its end, at its best step, and in between."""
    muon, adamw = rates_of(cell.width)
    text = (folder / f"{cell.text}.train.txt").read_text()
    ratio = tokens_per_byte([text], (cell.vocabulary,))[cell.vocabulary]
    epochs = cell.steps * cell.tokens_per_step / (ratio * len(text.encode()))
    values = {
        "run.name": cell.name,
        "run.output_dir": folder / "runs",
        "data.cache_dir": folder / "cache",
        "data.source": "files",
        "data.files": [str(folder / f"{cell.text}.train.txt")],
        "data.val_files": [str(folder / f"{cell.text}.val.txt")],
        "tokenizer.kind": "bpe",
        "tokenizer.vocab_size": cell.vocabulary,
        "model.hidden_size": cell.width,
        "model.num_hidden_layers": cell.layers,
        "model.num_attention_heads": heads_of(cell.width),
        "batch.sequence_length": cell.sequence_length,
        "batch.tokens_per_step": cell.tokens_per_step,
        "optim.learning_rate": round(muon, 5),
        "optim.adamw_learning_rate": round(adamw, 5),
        "train.max_steps": cell.steps,
        "train.eval_every_steps": max(50, cell.steps // 8),
        "train.eval_tokens": 20_000,
        "train.final_eval_tokens": None,
        "train.cpu_threads": 1,
        "train.compile": False,
        "train.mixed_precision": "bf16",
        "train.sample_tokens": None,
        "train.resume": "auto",  # of a process that was killed, whose claim somebody has removed
        **values_of_repeats(epochs, cell.steps),
    }
    summary = api.train(load_config(["--config=small"], values=values))
    run = folder / "runs" / cell.name
    rows = [row for row in read_rows(run / "metrics.jsonl") if row.get("val_loss") is not None]
    shutil.rmtree(run)
    return {
        "name": cell.name,
        **asdict(cell),
        "train_bytes": len(text.encode()),
        "density": density(text[:2_000_000]),
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
