"""Which idea lowers the loss of a small model? Start it once per core, then without --seeds for the tables:

    python benchmarks/learning/ideas.py --shakespeare input.txt --seeds 1 2 3 --ideas base "mtp 0.5" "untied + decay 0"
    python benchmarks/learning/ideas.py --shakespeare input.txt

Trains each idea, or several together, on each of TASKS with each seed, one thread per process, and adds a row for each
to ideas.jsonl beside this file. Differences are paired by seed, with p and a test for equivalence within 0.005 nats
(hfgolf compare has the same). The ideas are values of the config, and hooks that do what hfgolf does not. Shakespeare
is its first 90 %, so that no choice sees the last tenth. "packages" is a model of 27 M weights, on 50 MB of source.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hfgolf
from hfgolf import api
from hfgolf.compare.statistics import equivalence, paired_difference
from hfgolf.config.parse import load_config
from hfgolf.system.hardware import device_name

sys.path.append(str(Path(__file__).parents[1]))
from jobs import do_unclaimed, series_of
from law.proof import package_source

ROWS, CLAIMS = Path(__file__).parent / "ideas.jsonl", Path("ideas_claims")
MARGIN = 0.005
SMALLER = {"model.hidden_size": 128, "model.num_hidden_layers": 3}
RATES = {"optim.learning_rate": 0.028, "optim.adamw_learning_rate": 0.02}
CHARACTERS = {"train.max_minutes": None, "train.final_eval_tokens": None}
SHAKESPEARE = SMALLER | RATES | {"data.split": "contiguous", "tokenizer.vocab_size": 1024, "model.dropout": 0.1}
LARGER = {"model.hidden_size": 512, "model.num_hidden_layers": 8, "model.num_attention_heads": 8}
LARGER |= {"train.eval_every_steps": 200, "train.final_eval_tokens": 200_000}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "shakespeare": ("small", SHAKESPEARE | {"train.max_steps": 600}),
    "shakespeare, 350 steps": ("small", SHAKESPEARE | {"train.max_steps": 350}),
    "shakespeare, 1,500 steps": ("small", SHAKESPEARE | {"train.max_steps": 1500}),
    "python": ("small", SMALLER | RATES | {"tokenizer.vocab_size": 2048, "train.max_steps": 850}),
    "small": ("small", {}),
    "characters": ("shakespeare_char", CHARACTERS | {"train.max_steps": 900, "train.eval_every_steps": 300}),
    "characters, 2,360 steps": ("shakespeare_char", CHARACTERS | {"train.max_steps": 2360}),
    "packages": ("small", LARGER | {"train.max_steps": 400}),
    "packages, 320 steps": ("small", LARGER | {"train.max_steps": 320}),
}
"""{name: config, changes of it}."""
UNTIED = {"model.tie_word_embeddings": False}
NORMUON = {"optim.normuon_beta2": 0.95}
MUONEQ = {"optim.row_equilibration": True}
SEGMENTS = {"batch.segment_length": 64}
FORMER = {"optim.row_equilibration": False, "optim.normuon_beta2": None, "model.induction_heads": 0}
FORMER |= {"batch.segmented_tokens": None}


class Idea(hfgolf.Hook):
    """A hook that may act before and after each step; progress is the share of the run's steps that are over."""

    progress = 0.0
    is_last = False

    def before_step(self, run: Any, expected_steps: float) -> None:
        self.progress = run.state.step / expected_steps
        self.is_last = run.state.step + 1 >= expected_steps
        self.before(run)

    @torch.no_grad()
    def after_step(self, run: Any, result: Any) -> None:
        self.after(run, list(run.raw_model.parameters()))

    def before(self, run: Any) -> None: ...

    def after(self, run: Any, weights: list[Tensor]) -> None: ...


class EmaNesterov(Idea):
    """Take the gradient ahead of the weights, along an average of their updates (arXiv 2605.25395)."""

    def __init__(self, beta: float, decay: float, first: float = 0.15, last: float = 0.75) -> None:
        self.beta, self.decay, self.first, self.last = beta, decay, first, last
        self.former: list[Tensor] = []
        self.average: list[Tensor] = []

    def after(self, run: Any, weights: list[Tensor]) -> None:
        if self.former:
            self.average = self.average or [torch.zeros_like(weight) for weight in weights]
            torch._foreach_lerp_(self.average, torch._foreach_sub(weights, self.former), 1 - self.decay)
        self.former = [weight.clone() for weight in weights]
        if self.average and self.first <= self.progress < self.last:
            group = run.optimizer.param_groups[0]
            torch._foreach_add_(weights, self.average, alpha=self.beta * group["lr"] / group["initial_lr"])


class Tail(Idea):
    """Blend an average over the end of the run into the last weights, except the embedding (modded-nanogpt, #45)."""

    def __init__(self, share: float, first: float = 0.85) -> None:
        self.share, self.first = share, first
        self.average: list[Tensor] = []

    def after(self, run: Any, weights: list[Tensor]) -> None:
        weights = [weight for name, weight in run.raw_model.named_parameters() if "embed_tokens" not in name]
        if self.progress >= self.first:
            self.average = self.average or [weight.clone() for weight in weights]
            torch._foreach_lerp_(self.average, weights, 1 / (run.state.step * (1 - self.first) / 3))
        if self.is_last:
            torch._foreach_lerp_(weights, self.average, self.share)


class Scaled(Idea):
    """Multiply a number of each group, or of the groups of one kind, by a factor that depends on the progress."""

    def __init__(self, key: str, factor: Callable[[float], float], kind: str | None = None) -> None:
        self.key, self.factor, self.kind = key, factor, kind
        self.peaks: list[float] = []

    def before(self, run: Any) -> None:
        groups = [group for group in run.optimizer.param_groups if self.kind in (None, group["kind"])]
        self.peaks = self.peaks or [group[self.key] for group in groups]
        for group, peak in zip(groups, self.peaks, strict=True):
            group[self.key] = peak * self.factor(self.progress)


def power(exponent: float, warmdown: float = 0.5) -> Scaled:
    """Return a hook that decays the rate as a power of what is left of the warmdown."""
    return Scaled("initial_lr", lambda progress: min(1.0, (1 - progress) / warmdown) ** (exponent - 1))


def head_rate(factor: float) -> Scaled:
    """Return a hook that gives an untied head another rate."""
    return Scaled("initial_lr", lambda progress: factor, kind="head")


def high_low_high(low: float) -> Scaled:
    """Return a hook that lowers the weight decay in the middle of the run."""
    return Scaled("initial_weight_decay", lambda progress: low if 0.3 < progress < 0.7 else 1.0)


class MultiToken(Idea):
    """Let the logits predict the token after the next one as well, with a weight that falls to 0."""

    def __init__(self, weight: float, until: float = 0.67) -> None:
        self.weight, self.until = weight, until

    def start(self, run: Any) -> None:
        run.raw_model.cross_entropy = _TwoTokens(self, run.raw_model.cross_entropy, run.config.batch.sequence_length)


class TokenDropout(Idea):
    """Hide input tokens from the model: their embeddings are 0 in training (Gal and Ghahramani 2016, section 4.2)."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def start(self, run: Any) -> None:
        def hide(module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
            is_kept = torch.rand(embedded.shape[:2], device=embedded.device) >= self.rate
            return embedded * is_kept[..., None] if module.training else embedded

        run.raw_model.model.embed_tokens.register_forward_hook(hide)


class _TwoTokens(nn.Module):
    def __init__(self, idea: MultiToken, plain: nn.Module, length: int) -> None:
        super().__init__()
        self.idea, self.plain, self.length = [idea], plain, length

    def forward(self, hidden: Tensor, head: Tensor, targets: Tensor, *rest: Any) -> Tensor:
        idea = self.idea[0]
        weight = idea.weight * (1 - idea.progress / idea.until)
        nats: Tensor = self.plain(hidden, head, targets, *rest)
        if not self.training or weight <= 0:
            return nats
        later = F.pad(targets.view(-1, self.length)[:, 1:], (0, 1), value=-100).flatten()
        return (nats + weight * self.plain(hidden, head, later, *rest)) / (1 + weight)


IDEAS: dict[str, tuple[dict[str, Any], Callable[[], Idea] | None]] = {
    "base": ({}, None),
    "no induction heads": ({"model.induction_heads": 0}, None),
    "plain muon": ({"optim.row_equilibration": False, "optim.normuon_beta2": None}, None),
    "as in 1b62f13": (FORMER, None),
    "untied": (UNTIED, None),
    "untied, embedding x 3": (UNTIED | {"optim.embedding_learning_rate": 3.0}, None),
    "untied, head x 0.5": (UNTIED, lambda: head_rate(0.5)),
    "untied, head x 0.25": (UNTIED, lambda: head_rate(0.25)),
    "dropout 0.05": ({"model.dropout": 0.05}, None),
    "dropout 0.1": ({"model.dropout": 0.1}, None),
    "token dropout 0.05": ({}, lambda: TokenDropout(0.05)),
    "token dropout 0.1": ({}, lambda: TokenDropout(0.1)),
    "mtp 0.5": ({}, lambda: MultiToken(0.5)),
    "mtp 0.2": ({}, lambda: MultiToken(0.2)),
    "ema-nesterov 0.6 0.97": ({}, lambda: EmaNesterov(0.6, 0.97)),
    "ema-nesterov 0.6 0.99": ({}, lambda: EmaNesterov(0.6, 0.99)),
    "tail 0.4": ({}, lambda: Tail(0.4)),
    "power 1.2": ({}, lambda: power(1.2)),
    "floor 0.1": ({"schedule.floor": 0.1}, None),
    "floor 0.2": ({"schedule.floor": 0.2}, None),
    "warmdown 0.8": ({"schedule.warmdown_fraction": 0.8}, None),
    "warmdown 1, power 1.2": ({"schedule.warmdown_fraction": 1.0}, lambda: power(1.2, warmdown=1.0)),
    "decay high, low, high": ({}, lambda: high_low_high(0.3)),
    "decay 0": ({"optim.weight_decay": 0.0}, None),
    "decay 0.3": ({"optim.weight_decay": 0.3}, None),
    "cautious": ({"optim.cautious_weight_decay": True}, None),
    "normuon": (NORMUON, None),
    "muoneq": (MUONEQ, None),
    "beta1 0.8": ({"optim.betas": [0.8, 0.95]}, None),
    "momentum 0.9": ({"optim.momentum": 0.9}, None),
    "momentum warmup 50": ({"optim.momentum_warmup_steps": 50}, None),
    "segments never": ({"batch.segment_length": None}, None),
    "segments always": (SEGMENTS | {"batch.segmented_tokens": None}, None),
    "segments in 30,000 tokens": (SEGMENTS | {"batch.segmented_tokens": 30_000}, None),
    "segments in 90,000 tokens": (SEGMENTS | {"batch.segmented_tokens": 90_000}, None),
    "segments in 300,000 tokens": (SEGMENTS | {"batch.segmented_tokens": 300_000}, None),
    "rates x 1.4": ({"optim.learning_rate": 1.4, "optim.adamw_learning_rate": 1.4}, None),
    "muon x 0.7": ({"optim.learning_rate": 0.7}, None),
    "muon x 1.4": ({"optim.learning_rate": 1.4}, None),
    "muon x 2": ({"optim.learning_rate": 2.0}, None),
    "adamw x 0.5": ({"optim.adamw_learning_rate": 0.5}, None),
    "adamw x 0.7": ({"optim.adamw_learning_rate": 0.7}, None),
    "adamw x 1.4": ({"optim.adamw_learning_rate": 1.4}, None),
    "adamw x 2": ({"optim.adamw_learning_rate": 2.0}, None),
    "vectors x 0.3": ({"optim.vector_learning_rate": 0.3}, None),
    "vectors x 2": ({"optim.vector_learning_rate": 2.0}, None),
    "skips": ({"model.overrides.unet_skips": "gated"}, None),
    "head gates": ({"model.overrides.head_gate": 12, "model.overrides.head_gate_peak": 2.0}, None),
    "smear gate": ({"model.overrides.smear_gate": 12}, None),
    "own value excluded": ({"model.overrides.exclude_self_value": 2}, None),
    "value embeddings": ({"model.overrides.value_embedding_layers": 2}, None),
    "embedding residual": ({"model.overrides.embedding_residual": True}, None),
    "query gain": ({"model.overrides.query_gain": 1.0}, None),
}
"""{name: changes of the config, hook}. A rate is a factor of the task's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shakespeare", type=Path, required=True, help="the text tinyshakespeare")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ideas", nargs="+", type=known, default=list(IDEAS), metavar="IDEA")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--base", type=known, default="base", metavar="IDEA", help="to compare with (base)")
    arguments = parser.parse_args()

    def row(task: str, idea: str, seed: int) -> dict[str, Any]:
        loss = train(task, idea, seed, arguments.shakespeare)
        return {"task": task, "idea": idea, "seed": seed, "val_loss": loss, "machine": device_name(torch.device("cpu"))}

    jobs = itertools.product(arguments.seeds, arguments.ideas, arguments.tasks)
    named = ((f"{task}-{idea}-{seed}", partial(row, task, idea, seed)) for seed, idea, task in jobs)
    do_unclaimed(named, CLAIMS, ROWS)
    found = series_of(ROWS, lambda row: ", ".join(filter(None, (row["task"], row.get("machine")))))
    for title, rows in found.items():
        if rows[0]["task"] in arguments.tasks:
            report(title, rows, arguments.base)


def known(together: str) -> str:
    if unknown := [idea for idea in together.split(" + ") if idea not in IDEAS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of: {', '.join(IDEAS)}")
    return together


def changes_of(ideas: str, peaks: dict[str, Any]) -> tuple[dict[str, Any], list[Idea]]:
    """Return what ideas change in a config, and their hooks. peaks: values with the rates of Muon and AdamW."""
    values: dict[str, Any] = {}
    hooks = []
    for changes, hook in (IDEAS[idea] for idea in ideas.split(" + ")):
        for key, value in changes.items():
            factor = peaks.get(key, peaks["optim.adamw_learning_rate"]) if key.endswith("learning_rate") else 1
            values[key] = value * factor if factor != 1 else value
        hooks += [hook()] if hook else []
    return values, hooks


def train(task: str, ideas: str, seed: int, shakespeare: Path, others: Sequence[hfgolf.Hook] = ()) -> float:
    """Return the validation loss at the end, in nats per token of the whole held-out part. others: more hooks."""
    config, task_values = TASKS[task]
    rates = load_config(["--config", config], values=task_values).config.optim
    peaks = {"optim.learning_rate": rates.learning_rate, "optim.adamw_learning_rate": rates.adamw_learning_rate}
    changes, hooks = changes_of(ideas, peaks)
    values = task_values | changes
    with tempfile.TemporaryDirectory() as folder:
        if task not in ("python", "small"):
            text = Path(folder, "text.txt")
            is_source = task.startswith("packages")
            content = package_source(50_000_000).encode() if is_source else shakespeare.read_bytes()[:1_003_854]
            text.write_bytes(content)
            values |= {"data.source": "files", "data.files": [str(text)]}
        values |= {"run.seed": seed, "run.name": "run", "run.output_dir": folder}
        values |= {"train.cpu_threads": 1, "train.compile": False, "train.sample_tokens": None}
        return float(api.train(load_config(["--config", config], values=values), [*hooks, *others])["val_loss"])


def report(title: str, rows: list[dict[str, Any]], base_idea: str) -> None:
    """Print the ideas on a task and a machine, best first, with differences from the base paired by seed."""
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        losses.setdefault(row["idea"], {})[row["seed"]] = row["val_loss"]
    base = losses.get(base_idea, {})
    print(f"{title}: {sum(base.values()) / max(1, len(base)):.4f} nats per token ({len(base)} seeds)")
    for idea in sorted(losses, key=lambda name: sum(losses[name].values()) / len(losses[name])):
        found = paired_difference(losses[idea], base)
        if idea == base_idea or found is None:
            continue
        same = equivalence(list(found.by_seed.values()), MARGIN)
        p = math.nan if found.p_value is None else found.p_value
        equal = math.nan if same is None else same.p_value
        print(f"  {idea:26} {found.mean:+.4f}, p {p:.3f}, equivalence p {equal:.3f} ({len(found.by_seed)} seeds)")


if __name__ == "__main__":
    main()
