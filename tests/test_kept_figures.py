"""The figures that README, docs and config headers state are those of the kept files they name."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hfgolf.config.parse import load_config
from hfgolf.measure.flops import training_flops_per_token
from hfgolf.train.build import build_model

ROOT = Path(__file__).parents[1]
EXPERIMENTS, BENCHMARKS = "benchmarks/experiments/results", "benchmarks/results"
SMALL_VAL_BYTES = 467_598  # of the text of configs/small.yaml, Python 3.11.7


@cache
def kept(folder: str, name: str) -> Any:
    return json.loads((ROOT / folder / f"{name}.json").read_text(encoding="utf-8"))


def tflop(config: str, vocabulary: int, tokens: float) -> float:
    """Return the FLOPs of training a shipped config on so many tokens, in units of 1e12."""
    loaded = load_config(["--config", str(ROOT / "configs" / f"{config}.yaml")]).config
    with torch.device("meta"):
        model = build_model(loaded, vocabulary, "cpu")
    return training_flops_per_token(model, loaded.batch.sequence_length) * tokens / 1e12


def small() -> dict[str, list[str]]:
    found = kept(EXPERIMENTS, "small_seeds")
    arm, losses = found["arms"]["small"], found["arms"]["small"]["final_losses"].values()
    mean, low, high = (f"{loss:.3f}" for loss in (arm["mean"], min(losses), max(losses)))
    per_nat = found["val_tokens"] / math.log(2) / SMALL_VAL_BYTES
    bits, low_bits, high_bits = (f"{loss * per_nat:.3f}" for loss in (arm["mean"], min(losses), max(losses)))
    tokens = arm["steps"] * 2048
    work, minutes = f"{tflop('small', 4096, tokens):.1f}", f"{arm['seconds'] / 60:.0f} minutes beside other runs"
    header = [f"validation loss {mean}, {bits} bits per byte ({low_bits} to {high_bits}) after {tokens:,} tokens"]
    return {
        "README.md": [
            f"| {mean} | {low} to {high} |",
            f"| {bits} | {low_bits} to {high_bits} |",
            f"| {tokens:,} tokens, {work} TFLOP of training | {minutes};",
        ],
        "configs/small.yaml": [*header, f"{work} TFLOP, in {minutes}"],
        "docs/experiments.md": [f"{float(work):.0f} TFLOP | ", f"{float(bits):.2f} bits per byte"],
    }


def shakespeare() -> dict[str, list[str]]:
    ten = kept(EXPERIMENTS, "shakespeare_minutes")["arms"]["ten"]
    work, mean = f"{tflop('shakespeare_char', 257, 4096 * ten['steps']):.0f} TFLOP", f"{ten['mean']:.4f}"
    losses, speed = list(ten["final_losses"].values()), f"{round(4096 * ten['steps'] / ten['seconds'], -2):,.0f}"
    return {
        "docs/experiments.md": [
            f"| {work} | {speed} tokens/s on one core beside another run |",
            f"beside another run, took {ten['seconds'] / 60:.0f} minutes",
            f"validation loss of {mean} after {work} of training",
            f"seed 1, which ends at {losses[0]:.4f}",
        ],
        "configs/shakespeare_char.yaml": [f"{losses[0]:.3f}, {losses[1]:.3f} and {losses[2]:.3f}", work],
        "benchmarks/shakespeare.md": [f"at most {work}", f"{mean} and {ten['sd']:.4f}", f"{speed} characters/s"],
    }


def laptop() -> dict[str, list[str]]:
    runs = kept(EXPERIMENTS, "golf_laptop")
    seeds, before = ([run for name, run in runs.items() if name[:-1] == kind] for kind in ("round-", "laptop-"))
    after = [run["after"] for run in seeds]
    assert len(seeds) == len(before) == 3
    (flat, sliding, mean), of_before = (
        [sum(run[name] for run in three) / 3 for name in ("flat", "sliding", "after")] for three in (seeds, before)
    )
    work = tflop("golf_laptop", 2048, seeds[0]["tokens"])
    parts = [f"| {score:.4f} |" for score in (flat, sliding, mean)]
    smallest, largest = (f(run["bytes"] for run in seeds) for f in (min, max))
    every = ", ".join(f"{score:.4f}" for score in after)
    speed = round(sum(run["tokens_per_second"] for run in seeds) / 3, -2)
    same_config = "scored {:.4f}, {:.4f} and {:.4f}".format(*of_before)
    return {
        "docs/golf.md": [
            f"| {smallest:,} to {largest:,} | **{mean:.3f}** ({every}) |",
            f"| {runs['round-w160-1']['bytes']:,} | {runs['round-w160-1']['after']:.4f} (one seed) |",
            *(f"({work:.0f} TFLOP)", same_config, *parts),
        ],
        "configs/golf_laptop.yaml": [f"{mean:.3f} bits per", f"({min(after):.3f} to {max(after):.3f})", f"{largest:,}"],
        "docs/experiments.md": [
            f"| {work:.0f} TFLOP | {speed:,.0f} tokens/s on one core of a Xeon with AMX | {mean:.2f} bits"
        ],
    }


def evaluation_modes() -> dict[str, list[str]]:
    rows = kept(EXPERIMENTS, "evaluation_modes")
    pairs = zip(rows["laptop"], rows["shakespeare"], strict=True)
    return {"docs/golf.md": [f"| {one['bits_per_byte']:.4f} | {other['bits_per_byte']:.4f} |" for one, other in pairs]}


def against_trainer() -> dict[str, list[str]]:
    stated = {"docs/speed.md": []}
    for machine, name in (("cpu", "Xeon with AMX"), ("epyc", "EPYC with AVX512-BF16")):
        by_shape = {row["shape"]: row["arms"] for row in kept(BENCHMARKS, f"train_throughput_{machine}")["results"]}
        arms = by_shape["characters"]
        adamw, muon = (f"{arms[arm]['faster']:.2f}x" for arm in ("hfgolf_bf16_compiled", "hfgolf_muon"))
        memory = f"{arms['hfgolf_bf16_compiled']['memory']:.2f}x"
        ours, theirs = (1e3 * arms[arm]["step_seconds"] for arm in ("hfgolf_bf16_compiled", "trainer_bf16_compiled"))
        stated["docs/speed.md"] += [
            f"| {adamw} as fast ({ours:.0f} ms against {theirs:.0f} ms) |",
            f"| {adamw} | {muon} | {memory} | `benchmarks/results/train_throughput_{machine}.json` |",
            f"| {name} |",
        ]
    return stated


def golf_export() -> dict[str, list[str]]:
    result = kept(EXPERIMENTS, "golf_export")
    stated = [f"the float weights score {result['slice_float']:.4f}", f"take {result['int8_zlib_bytes']:,} bytes"]
    for row in result["exports"]:
        ledger = row["ledger"]
        stated.append(f"| {ledger['budget_bytes']:,} | {ledger['totals']['challenge']:,} | ")
        scores = ledger["before"]["bpb"], ledger["after"]["bpb"], row["slice_export"], row["slice_zlib"]
        stated.append(f" | {' | '.join(f'{score:.4f}' for score in scores)} |")
    return {"docs/golf.md": stated}


def vocabulary() -> dict[str, list[str]]:
    studies = kept(EXPERIMENTS, "vocabulary")["studies"]
    stated = []
    library = "standard library of Python 3.11.7"
    for row in studies[library]["vocabularies"]:
        if row.get("entries") in (257, 1024, 4096, 16384, 50257):
            stated.append(
                f"| {row['entries']:,} | {row['tokens_per_character']:.3f} | {row['bytes_per_token']:.3f} |"
                f" {row['context_tokens']} | {row['embedding_parameters']:,} | {row['embedding_share']:.1%} |"
            )
    for text in ("tinyshakespeare", library):
        for with_operators in studies[f"{text}, case operators"]["vocabularies"]:
            size = with_operators["size"]
            plain = next(row for row in studies[text]["vocabularies"] if row["size"] == size)
            before, after = (1 / row["bytes_per_token"] for row in (plain, with_operators))
            stated.append(f"| {text} | {size:,} | {before:.4f} | {after:.4f} | {after / before - 1:.1%} |")
    assert len(stated) == 9
    return {"docs/experiments.md": stated}


def distillation() -> dict[str, list[str]]:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/learning/distill.jsonl").read_text().splitlines()]
    stated = []
    for text, teachers in (("shakespeare", 1), ("shakespeare", 2), ("shakespeare200", 1), ("shakespeare200", 2)):
        alone, taught = (
            {r["seed"]: r["val_loss"] for r in rows if (r["text"], r["teachers"], r["share"]) == found}
            for found in ((text, 0, 0.0), (text, teachers, 0.5))
        )
        seeds = [seed for seed in taught if seed < 100]  # the others are those of teachers
        before, after = (sum(losses[seed] for seed in seeds) / len(seeds) for losses in (alone, taught))
        stated.append(f"| {teachers} | {after:.4f} ({len(seeds)}) | {after - before:+.3f}, p")
        stated.append(f"| {before:.4f} |")
    return {"docs/experiments.md": stated}


def repetitions() -> dict[str, list[str]]:
    times = kept(BENCHMARKS, "against_gpt2_cpu")["results"][0]["seconds"]["hfgolf"]
    step = next(row for row in kept(BENCHMARKS, "train_throughput_cpu")["results"] if row["shape"] == "small")
    milliseconds = 1e3 * step["arms"]["hfgolf_bf16_compiled"]["step_seconds"]
    return {
        "docs/speed.md": [f"(medians of {len(times)}, the ratio is"],
        "benchmarks/README.md": [f"0.08 ms of {milliseconds:.0f} ms"],
    }


@pytest.mark.parametrize(
    "figures",
    [small, shakespeare, laptop, evaluation_modes, against_trainer, golf_export, vocabulary, distillation, repetitions],
    ids=lambda f: f.__name__,
)
def test_stated_figures_are_those_of_the_kept_files(figures):
    for page, texts in figures().items():
        words = " ".join((ROOT / page).read_text(encoding="utf-8").replace("\n# ", " ").split())
        assert [text for text in texts if text not in words] == [], page
