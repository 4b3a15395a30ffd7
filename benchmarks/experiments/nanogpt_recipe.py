"""nanoGPT's CPU recipe for character-level Shakespeare, rebuilt with transformers' GPT-2 and torch's AdamW.

    python benchmarks/experiments/nanogpt_recipe.py path/to/tinyshakespeare.txt

The settings come from the command in nanoGPT's README for a computer without a GPU: 4 layers of width 128, 64
characters of context, 12 sequences per step, 2,000 steps, learning rate 1e-3 decaying to 1e-4, fp32. The number of
steps is fixed, so the speed of the machine does not change the loss. One difference: GPT2LMHeadModel has biases, but
nanoGPT's default has none.

There are two losses per seed. "whole" predicts each of the last 10 % of the characters once, like hfgolf's validation.
"estimate" is the mean over 20 random batches, which is what nanoGPT prints. Writes results/nanogpt_recipe.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_with_min_lr_schedule_with_warmup

from hfgolf.system.durable import write_text
from hfgolf.system.hardware import fingerprint

CONTEXT, BATCH, STEPS = 64, 12, 2000
WARMUP_STEPS, LEARNING_RATE, MIN_LEARNING_RATE = 100, 1e-3, 1e-4
EVAL_BATCHES = 20
RESULT = Path(__file__).parent / "results" / "nanogpt_recipe.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="tinyshakespeare.txt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()

    train, val, vocab_size = read_characters(arguments.text)
    print(f"{len(train):,} training characters, {len(val):,} validation characters, {vocab_size} distinct")
    runs = []
    for seed in arguments.seeds:
        model = train_gpt2(train, vocab_size, seed)
        runs.append({"seed": seed, "whole": whole_loss(model, val), "estimate": estimated_loss(model, val)})
        print("seed {seed}: whole {whole:.4f}, estimate {estimate:.4f}".format(**runs[-1]), flush=True)
    means = {name: statistics.mean(run[name] for run in runs) for name in ("whole", "estimate")}
    print("mean:   whole {whole:.4f}, estimate {estimate:.4f}".format(**means))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {"hardware": fingerprint(), "versions": versions, "runs": runs, "means": means}
    write_text(arguments.output, json.dumps(result, indent=1) + "\n")


def read_characters(path: Path) -> tuple[Tensor, Tensor, int]:
    """Return the ids of the first 90 % of the characters, those of the rest, and the number of distinct characters."""
    text = path.read_text()
    id_of = {character: i for i, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([id_of[character] for character in text])
    train, val = ids.tensor_split([int(0.9 * len(ids))])
    return train, val, len(id_of)


def train_gpt2(ids: Tensor, vocab_size: int, seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99))
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, WARMUP_STEPS, STEPS, min_lr=MIN_LEARNING_RATE)
    for _ in range(STEPS):
        mean_loss(model, random_windows(ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def random_windows(ids: Tensor) -> Tensor:
    """Return BATCH windows of CONTEXT + 1 characters at random places."""
    starts = torch.randint(len(ids) - CONTEXT, (BATCH, 1))
    return ids[starts + torch.arange(CONTEXT + 1)]


def mean_loss(model: GPT2LMHeadModel, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def estimated_loss(model: GPT2LMHeadModel, ids: Tensor) -> float:
    return statistics.mean(mean_loss(model, random_windows(ids)).item() for _ in range(EVAL_BATCHES))


@torch.no_grad()
def whole_loss(model: GPT2LMHeadModel, ids: Tensor) -> float:
    """Return the mean loss of all characters but the first, each predicted from at most CONTEXT characters."""
    nats = 0.0
    for start in range(0, len(ids) - 1, 512 * CONTEXT):
        piece = ids[start : start + 512 * CONTEXT + 1]
        whole = (len(piece) - 1) // CONTEXT * CONTEXT
        windows = piece[: whole + 1].unfold(0, CONTEXT + 1, CONTEXT)
        for rows in (windows, piece[whole:].unsqueeze(0)):
            if rows.shape[0] and rows.shape[1] > 1:
                nats += mean_loss(model, rows).item() * rows.shape[0] * (rows.shape[1] - 1)
    return nats / (len(ids) - 1)


if __name__ == "__main__":
    main()
