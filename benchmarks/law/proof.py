"""Does the autopilot choose well? python benchmarks/law/proof.py --texts a.txt b.txt --minutes 1 3 10 --seeds 1 2

Trains each text for each number of minutes as `hfgolf train TEXT --minutes N` does, then a grid of twelve runs around
what it chose, in as many minutes: the next widths and vocabularies, alone and together, with the rates that go with
them; both rates times 0.7 and 1.4; other dropout; a shorter training. And configs/small.yaml's shape. Adds a row for
each run to proof.jsonl beside this file, and prints how far the choice is from the best, in nats per token of the
choice. What is in the file is not trained again. The machine must be quiet: minutes are the measure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from hfgolf import api
from hfgolf.config.parse import AUTOPILOT, load_config
from hfgolf.run.folder import run_folder
from hfgolf.train.autopilot import VOCABULARIES, WIDTHS
from hfgolf.train.law import heads_of, layers_of, rates_of

ROWS = Path(__file__).parent / "proof.jsonl"
CHOICE, SMALL = "choice", "small"
RECORDED = tuple(key for key in AUTOPILOT if key != "train.eval_every_steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", type=Path, required=True)
    parser.add_argument("--minutes", nargs="+", type=float, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", nargs="+", help="names of the grid's runs, such as choice width- rates-")
    arguments = parser.parse_args()
    for text in arguments.texts:
        for minutes in arguments.minutes:
            for seed in arguments.seeds:
                chosen = row_of(text, minutes, seed, CHOICE, {})
                around = neighbors(chosen["config"])
                for name, values in around.items():
                    if arguments.only is None or name in arguments.only:
                        row_of(text, minutes, seed, name, values)
            report(text.stem, minutes)


def neighbors(chosen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {name: values that are stated} of the runs around a choice."""
    is_byte = chosen["tokenizer.kind"] == "byte"
    width, vocabulary = chosen["model.hidden_size"], 256 if is_byte else chosen["tokenizer.vocab_size"]
    stay = {key: chosen[key] for key in RECORDED}
    widths, vocabularies = _beside(WIDTHS, width), _beside(VOCABULARIES, vocabulary)
    grid: dict[str, dict[str, Any]] = {}
    for at, of_width in {"": {}, **{f"width{sign}": _width(value) for sign, value in widths.items()}}.items():
        for kind, of_words in {"": {}, **{f"vocabulary{s}": _vocabulary(v) for s, v in vocabularies.items()}}.items():
            if at or kind:
                grid["".join((at, kind))] = stay | of_width | of_words
    rates = ("optim.learning_rate", "optim.adamw_learning_rate")
    for name, factor in (("rates-", 0.7), ("rates+", 1.4)):
        grid[name] = stay | {key: factor * chosen[key] for key in rates}
    grid["dropout"] = stay | {"model.dropout": 0.0 if chosen["model.dropout"] else 0.1}
    grid["shorter"] = stay | {"train.max_tokens": round(0.6 * chosen["tokens"])}
    grid[SMALL] = _width(256) | _vocabulary(4096) | {"model.dropout": 0.0, "train.max_tokens": None}
    grid[SMALL] |= {"batch.tokens_per_step": 2048}
    return grid


def _beside(values: tuple[int, ...], value: int) -> dict[str, int]:
    """Return {"-": the value before, "+": the value after}, as far as there are any."""
    place = values.index(value)
    return {sign: values[i] for sign, i in (("-", place - 1), ("+", place + 1)) if 0 <= i < len(values)}


def _width(width: int) -> dict[str, Any]:
    muon, adamw = rates_of(width)
    shape = {"hidden_size": width, "num_hidden_layers": layers_of(width), "num_attention_heads": heads_of(width)}
    rates = {"optim.learning_rate": muon, "optim.adamw_learning_rate": adamw}
    return {f"model.{key}": value for key, value in shape.items()} | rates


def _vocabulary(entries: int) -> dict[str, Any]:
    is_byte = entries == 256
    return {"tokenizer.kind": "byte" if is_byte else "bpe", "tokenizer.vocab_size": "auto" if is_byte else entries}


def row_of(text: Path, minutes: float, seed: int, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run, trained now if the file does not have it."""
    key = {"text": text.stem, "minutes": minutes, "seed": seed, "name": name}
    for row in rows():
        if key.items() <= row.items():
            return row
    with tempfile.TemporaryDirectory() as folder:
        stated = {"train.max_minutes": minutes, "run.seed": seed, "run.output_dir": folder, "run.name": "run"} | values
        resolved = load_config([str(text)], values=stated)
        summary = api.train(resolved)
        config = run_folder(resolved.config).read_config()
    row = key | {
        "bits_per_byte": summary["val_bits_per_byte"],
        "val_loss": summary["val_loss"],
        "steps": summary["steps"],
        "config": {"tokens": summary["tokens"]} | {k: v for k, v in config.items() if k in RECORDED},
    }
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def report(text: str, minutes: float) -> None:
    """Print the means over the seeds, best first, as distances from the choice in nats per token of the choice."""
    found: dict[str, list[float]] = {}
    for row in rows():
        if (row["text"], row["minutes"]) == (text, minutes):
            found.setdefault(row["name"], []).append(row["bits_per_byte"])
            if row["name"] == CHOICE:
                nats_per_bit = row["val_loss"] / row["bits_per_byte"]
    means = {name: sum(values) / len(values) for name, values in found.items()}
    print(f"{text}, {minutes:g} min: {means[CHOICE]:.4f} bits per byte")
    for name, mean in sorted(means.items(), key=lambda item: item[1]):
        print(f"  {name:22} {(mean - means[CHOICE]) * nats_per_bit:+.4f} nats per token ({len(found[name])} seeds)")


if __name__ == "__main__":
    main()
