"""What error feedback and coordinate descent cost and save at equal bytes.

    python benchmarks/experiments/golf_rounding.py --run runs/small --budgets 1800000 1200000 800000

Rounds the weights of a run to each budget in each way: to the nearest; with errors passed on to later columns (GPTQ);
and to later rows (feedback); by coordinate descent after that (descent); and all that an export does, with integers and
vectors that are trained after rounding (tuned). Scores them on the whole validation part in flat windows, as an export
does. "added" is what rounding adds to the loss of the float weights, in nats per token; "predicted" is that of the
matrices alone. Adds a row for each to golf_rounding.jsonl in results/. Losses don't depend on the load of the machine;
seconds do.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from golf_export import Scorer, Weights

from hfgolf.golf import gptq
from hfgolf.golf.artifact import model_encoder
from hfgolf.golf.export import curvature_of, tuning_batches
from hfgolf.golf.packing import fill
from hfgolf.golf.quantize import QuantizedModel, matrices, quantize_model
from hfgolf.golf.source import run_source
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.train.console import quiet_libraries

RESULTS = Path(__file__).parent / "results" / "golf_rounding.jsonl"
ARMS = ("nearest", "columns", "feedback", "descent", "tuned")
SWEEPS = gptq._SWEEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--budgets", required=True, type=int, nargs="+", help="bytes of the artifact alone")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--calibration_tokens", type=int, default=32_768)
    arguments = parser.parse_args()
    quiet_libraries()
    subject = Subject(arguments.run, arguments.calibration_tokens)
    weights, curvature = subject.weights, subject.curvature
    print(f"{arguments.run.name}: {subject.exact_nats:.4f} nats per token in floats")
    print(f"{'bytes':>10}{'arm':>10}{'added':>9}{'predicted':>11}{'seconds':>9}")
    for budget in arguments.budgets:
        for arm in arguments.arms:
            begun_at = time.perf_counter()
            found, vectors = subject.rounded(arm, budget)
            seconds = time.perf_counter() - begun_at
            rounded = {name: one.dequantized() for name, one in found.tensors.items()}
            row = {
                "run": arguments.run.name,
                "weights": sum(weight.size for weight in weights.values()),
                "exact_nats": subject.exact_nats,
                "budget_bytes": budget,
                "bytes": found.size_bytes,
                "arm": arm,
                "calibration_tokens": arguments.calibration_tokens,
                "added_nats": subject.added_nats(rounded | vectors),
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


class Subject:
    """The weights of a run, which are rounded in the way of an arm, and scored on the whole validation part."""

    def __init__(self, run: Path, calibration_tokens: int = 32_768) -> None:
        self._source = source = run_source(run)
        assert isinstance(source.model, GolfForCausalLM)
        self._batches = list(tuning_batches(source, calibration_tokens))
        self.weights, self._encode = matrices(source.model), model_encoder(source.model)
        self.curvature = curvature_of(source, calibration_tokens)
        self._scorer = Scorer(source, len(source.tokens.val))
        self.exact_nats = self._nats({})

    def _nats(self, changed: Weights) -> float:
        score = self._scorer.score(changed)
        return float(score["nats"] / score["tokens"])

    def added_nats(self, changed: Weights) -> float:
        """Return what these weights add to the loss of the float weights, in nats per token."""
        return self._nats(changed) - self.exact_nats

    def rounded(self, arm: str, budget_bytes: int) -> tuple[QuantizedModel, Weights]:
        """Return the weights, rounded in the way of an arm so that the artifact takes these bytes, and vectors."""
        gptq._SWEEPS = SWEEPS if arm in ("descent", "tuned") else 0
        has_rows = arm in ("feedback", "descent", "tuned")
        curvature = {
            name: one if has_rows else replace(one, output_hessian=None) for name, one in self.curvature.items()
        }
        budget: dict[str, Any] = {"budget_bytes": budget_bytes, "overhead_bytes": 0}
        if arm != "tuned":
            method = "nearest" if arm == "nearest" else "gptq"
            size_of = lambda on_grids: len(self._encode(on_grids).data)  # noqa: E731
            return quantize_model(self.weights, curvature, size_of=size_of, method=method, **budget), {}
        model = self._source.model
        assert isinstance(model, GolfForCausalLM)
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        encoder = lambda: model_encoder(model)  # noqa: E731
        found, _ = fill(model, self.weights, curvature, encoder, self._batches, progress=print, **budget)
        vectors = {name: one.detach().numpy().copy() for name, one in model.named_parameters() if one.ndim < 2}
        model.load_state_dict(own)
        return found, vectors


if __name__ == "__main__":
    main()
