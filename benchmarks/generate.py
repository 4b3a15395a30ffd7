"""Tokens per second of greedy generation, compared with transformers' GPT2LMHeadModel with the same weights.

    python benchmarks/generate.py --output benchmarks/results/generate_cpu.json
    python benchmarks/generate.py --device cuda --output benchmarks/results/generate_gpu.json

Both use model.generate with a KV cache, in fp32 on a CPU and bf16 on a GPU. The time includes the prompt's forward
pass. Repetitions are interleaved in one process, and ratios are medians over pairs. The weights are random, and no
token ends the text. In fp32, both must generate the same tokens on either device. In bf16, rounding decides between
nearly equal logits, so the share of equal tokens is printed.

On a CPU with --threads 1, time is process time: other programs only affect it through the shared caches.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from machine import build_parser, write

MODELS: dict[str, dict[str, Any]] = {
    "small": {"n_embd": 256, "n_layer": 5, "n_head": 4, "vocab_size": 4096},
    "gpt2_124m": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
}
CASES = [(1, 16), (8, 16), (1, 512), (8, 512)]  # (batch size, prompt tokens)


def build(model: str, device: str) -> dict[str, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from hfgolf.publish.native import from_native

    torch.manual_seed(0)
    config = GPT2Config(**MODELS[model], n_positions=1024, bos_token_id=None, eos_token_id=None)
    gpt2 = GPT2LMHeadModel(config).eval()
    models = {"transformers": gpt2, "hfgolf": from_native(gpt2)}
    return {name: each.to(device) for name, each in models.items()}


def generate(model: Any, prompts: Any, new_tokens: int) -> Any:
    """Return the generated tokens, (B, new_tokens)."""
    import torch

    with torch.no_grad():
        mask = torch.ones_like(prompts)
        output = model.generate(prompts, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    assert output.shape[1] == prompts.shape[1] + new_tokens
    return output[:, prompts.shape[1] :]


def measure(model: str, device: str, new_tokens: int, repetitions: int) -> list[dict[str, Any]]:
    import torch

    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    models = build(model, device)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, MODELS[model]["vocab_size"], (batch, length), generator=generator).to(device)
        for batch, length in CASES
    ]
    variety = []
    for each in prompts:
        ours, theirs = (generate(models[name], each, new_tokens) for name in ("hfgolf", "transformers"))
        assert torch.equal(ours, theirs), f"{model}: the models generate different tokens from {tuple(each.shape)}"
        variety.append(len(ours.unique()))
    if device == "cuda":
        models = {name: each.to(torch.bfloat16) for name, each in models.items()}
    results = []
    for (batch, length), each, distinct in zip(CASES, prompts, variety, strict=True):
        seconds: dict[str, list[float]] = {name: [] for name in models}
        tokens = {}
        for repetition in range(repetitions + 1):
            for name, its_model in models.items():
                started_at = clock()
                tokens[name] = generate(its_model, each, new_tokens).cpu()  # waits for a GPU
                if repetition:  # the first one is the warmup
                    seconds[name].append(clock() - started_at)
        same = (tokens["hfgolf"] == tokens["transformers"]).double().mean().item()
        assert same == 1 or device == "cuda"
        shape = {"model": model, "batch": batch, "prompt_tokens": length, "new_tokens": new_tokens}
        results.append(shape | {"distinct_tokens": distinct, "same_tokens": same, "seconds": seconds})
        show(results[-1])
    return results


def show(measured: dict[str, Any]) -> None:
    number = measured["batch"] * measured["new_tokens"]
    speeds = {name: [number / each for each in times] for name, times in measured["seconds"].items()}
    ratios = [a / b for a, b in zip(speeds["hfgolf"], speeds["transformers"], strict=True)]
    line = f"{measured['model']:<11}{measured['batch']:>5}{measured['prompt_tokens']:>8}"
    for values in (speeds["transformers"], speeds["hfgolf"]):
        line += f"{median(values):>11,.1f}{f'{min(values):,.1f} to {max(values):,.1f}':>22}"
    line += f"{median(ratios):>9.2f}{f'{min(ratios):.2f} to {max(ratios):.2f}':>16}{measured['same_tokens']:>9.0%}"
    print(line)


def main() -> None:
    parser = build_parser(__doc__, repetitions=5)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default)")
    parser.add_argument("--model", choices=MODELS, help="only this one")
    arguments = parser.parse_args()

    import torch
    import transformers

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    print(f"{'':<24}{'transformers, tokens/s':>33}{'hfgolf, tokens/s':>33}{'faster':>9}{'':>16}{'same':>9}")
    print(
        f"{'model':<11}{'batch':>5}{'prompt':>8}" + f"{'median':>11}{'range':>22}" * 2 + f"{'':>9}{'':>16}{'tokens':>9}"
    )
    results = []
    for model in [arguments.model] if arguments.model else MODELS:
        results += measure(model, arguments.device, arguments.new_tokens, arguments.repetitions)
    figures = {"threads": torch.get_num_threads(), "dtype": "fp32" if arguments.device == "cpu" else "bf16"}
    write(arguments.output, ["torch", "transformers"], **figures, results=results)


if __name__ == "__main__":
    main()
