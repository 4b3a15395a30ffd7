"""What error feedback and coordinate descent cost and save at equal bytes.

    python benchmarks/experiments/golf_rounding.py --run runs/small --budgets 1800000 1200000 800000

Rounds the weights of a run to each budget in each way: to the nearest; with errors passed on to later columns (GPTQ);
and to later rows (feedback); and by coordinate descent after that, as an export does (descent). Scores them on the
whole validation part in flat windows, as an export does. "added" is what rounding adds to the loss of the float
weights, in nats per token. Adds a row for each to golf_rounding.jsonl in results/. Losses don't depend on the machine
or on its load; seconds do.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from golf_export import Scorer, Weights

from hfgolf.golf import gptq
from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.export import curvature_of
from hfgolf.golf.quantize import matrices, quantize_model
from hfgolf.golf.source import run_source
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.train.console import quiet_libraries

RESULTS = Path(__file__).parent / "results" / "golf_rounding.jsonl"
ARMS = ("nearest", "columns", "feedback", "descent")
SWEEPS = gptq._SWEEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--budgets", required=True, type=int, nargs="+", help="bytes of the artifact alone")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--calibration_tokens", type=int, default=32_768)
    arguments = parser.parse_args()
    quiet_libraries()
    source = run_source(arguments.run)
    model = source.model
    assert isinstance(model, GolfForCausalLM)
    weights, encode = matrices(model), model_encoder(model)
    scorer = Scorer(source, len(source.tokens.val))

    def nats(changed: Weights) -> float:
        score = scorer.score(changed)
        return float(score["nats"] / score["tokens"])

    exact = nats({})
    curvature = curvature_of(source, arguments.calibration_tokens)
    one_sided = {name: replace(one, output_hessian=None) for name, one in curvature.items()}
    print(f"{arguments.run.name}: {exact:.4f} nats per token in floats")
    print(f"{'bytes':>10}{'arm':>10}{'added':>9}{'predicted':>11}{'seconds':>9}")
    for budget in arguments.budgets:
        for arm in arguments.arms:
            gptq._SWEEPS = SWEEPS if arm == "descent" else 0
            begun_at = time.perf_counter()
            found = quantize_model(
                weights,
                curvature if arm in ("feedback", "descent") else one_sided,
                budget_bytes=budget,
                overhead_bytes=0,
                size_of=lambda on_grids: len(encode(on_grids).data),
                method="nearest" if arm == "nearest" else "gptq",
            )
            seconds = time.perf_counter() - begun_at
            rounded = {name: one.dequantized() for name, one in found.tensors.items()}
            row = {
                "run": arguments.run.name,
                "weights": sum(weight.size for weight in weights.values()),
                "exact_nats": exact,
                "budget_bytes": budget,
                "bytes": found.size_bytes,
                "arm": arm,
                "calibration_tokens": arguments.calibration_tokens,
                "added_nats": nats(rounded) - exact,
                "predicted_nats": sum(
                    curvature[name].loss_increase(one - weights[name]) for name, one in rounded.items()
                ),
                "seconds": seconds,
            }
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{row['bytes']:>10,}{arm:>10}{row['added_nats']:>9.4f}{row['predicted_nats']:>11.4f}{seconds:>9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
