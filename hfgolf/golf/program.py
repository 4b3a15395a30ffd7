"""The program that scores an artifact: what score.py does, before script.py packs it.

Runs where only torch, numpy and the standard library are: it imports of hfgolf what is packed with it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hfgolf.evaluate.windows import MODES, Plan, plan_windows, score, sum_nats
from hfgolf.golf.decoder import read_config, read_tensors, weights_of, weights_sha256
from hfgolf.golf.learner import score_and_learn
from hfgolf.model.layers_golf import GolfNetwork

LOGITS_PER_BATCH = 2**21  # with 8 times as many, the system spends as long on pages of memory as the model computes


def load_model(data: bytes, defaults: dict[str, Any]) -> tuple[SimpleNamespace, GolfNetwork, str]:
    """Return the config, the model with the weights of an artifact, and the SHA-256 of the weights.

    defaults: the config's, for what the artifact does not say. Raises ValueError, one line, if the artifact is damaged.
    """
    config = SimpleNamespace(**(defaults | read_config(data)))
    model = GolfNetwork(config).eval()
    parameters = model.state_dict()
    weights = weights_of(read_tensors(data, [tuple(parameter.shape) for parameter in parameters.values()]))
    for parameter, weight in zip(parameters.values(), weights, strict=True):
        parameter.copy_(torch.from_numpy(weight))
    return config, model, weights_sha256(weights)


def plan_of(config: Any, tokens: np.ndarray, mode: str = "flat", stride: int | None = None) -> Plan:
    """Return the windows that score a stream of tokens. Raises ValueError for arguments that allow no score."""
    length = min(config.max_position_embeddings, max(1, len(tokens) - 1))
    (separators,) = np.nonzero(tokens == config.eos_token_id)
    return plan_windows(mode, len(tokens), length, stride and min(stride, length), separators)


def evaluate(
    model: torch.nn.Module,
    config: Any,
    tokens: np.ndarray,
    token_bytes: np.ndarray,
    mode: str = "flat",
    stride: int | None = None,
    adapt_rate: float = 0.0,
) -> dict[str, Any]:
    """Return nats, tokens, bytes, bits per byte and the coverage of a model on a stream of tokens, in fp32.

    adapt_rate: learn from each window once it is scored, at this rate, from 0 on; the weights are as before afterwards.
    Raises ValueError for arguments that allow no score.
    """
    if len(tokens) != len(token_bytes) or tokens.max(initial=0) >= config.vocab_size:
        raise ValueError("tokens and bytes do not belong together, or to this model")
    plan = plan_of(config, tokens, mode, stride)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    batch_size = max(1, LOGITS_PER_BATCH // (plan.length * config.vocab_size))
    if adapt_rate:
        nats = score_and_learn(model, tokens, plan, adapt_rate)
    else:
        nats = score(lambda ids, labels: sum_nats(model(ids), labels), tokens.__getitem__, plan, batch_size, device)
    num_bytes = int(token_bytes[plan.targets()].sum(dtype=np.int64))
    figures = {"nats": nats, "tokens": plan.num_scored, "bytes": num_bytes, "bpb": nats / math.log(2) / num_bytes}
    return figures | plan.coverage()


def main(defaults: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact")
    parser.add_argument("tokens", help="uint16 ids, little-endian; uint32 if the vocabulary has more than 65,536")
    parser.add_argument("bytes", help="uint16 for each token: the bytes of text that it stands for")
    parser.add_argument("--mode", choices=MODES, default="flat")
    parser.add_argument("--stride", type=int)
    parser.add_argument("--adapt_rate", type=float, default=0.0)
    arguments = parser.parse_args()
    try:
        with open(arguments.artifact, "rb") as file:
            config, model, sha256 = load_model(file.read(), defaults)
        tokens = np.fromfile(arguments.tokens, "<u2" if config.vocab_size <= 2**16 else "<u4")
        token_bytes = np.fromfile(arguments.bytes, "<u2")
        figures = evaluate(model, config, tokens, token_bytes, arguments.mode, arguments.stride, arguments.adapt_rate)
    except Exception as error:  # a damaged artifact whose CRC is right raises anything
        sys.exit(f"error: {arguments.artifact}: {error}")
    print(json.dumps(figures | {"sha256": sha256}))
