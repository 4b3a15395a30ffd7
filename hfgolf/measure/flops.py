"""How many floating-point operations training takes, and how many the device could do.

Owns the count from the model's shapes, the table of device peaks and the measured peak where a device is not in it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hfgolf.model.modeling_golf import GolfForCausalLM

# Dense peaks without sparsity, in FLOP/s, by the name torch reports (first match wins): (16-bit, fp32 or TF32).
# From NVIDIA's data sheets: H200, H100, A100, L40S, L4, RTX Blackwell and Ada GPU architecture (appendix), T4, V100.
DEVICE_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("H200", 989e12, 494e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100", 989e12, 494e12),
    ("A100", 312e12, 156e12),
    ("L40S", 362e12, 183e12),
    ("L4", 121e12, 60e12),
    ("RTX 4090", 165e12, 82.6e12),
    ("T4", 65e12, 8.1e12),
    ("V100", 125e12, 15.7e12),
)


def training_flops_per_token(model: GolfForCausalLM, sequence_length: int) -> float:
    """Return the FLOPs of one token's forward and backward pass.

    Six for each weight that multiplies it (two forward, four backward: Kaplan et al. 2020, section 2.1), the head
    included and the embedding look-up not, and for attention's two products 6 x width x context a layer: the causal
    half of what PaLM counts (Chowdhery et al. 2022, appendix B), because the other half need not be computed.
    Recomputation (gradient checkpointing) is not useful work and is not counted.
    """
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    if config.tie_word_embeddings:
        matrices += config.vocab_size * config.hidden_size  # the head, which has the embedding's name
    attention = config.num_hidden_layers * config.hidden_size * sequence_length
    return 6.0 * matrices + 6.0 * attention


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the device's FLOP/s in a precision (no, bf16, fp16): from DEVICE_PEAKS, else measured by a product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, half, single in DEVICE_PEAKS:
            if known in name:
                return single if precision == "no" else half
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return measured_peak_flops(device, dtype)


def measured_peak_flops(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """Return the FLOP/s of the best of five square matrix products; about a tenth of a second on two CPU cores."""
    size = size or (1024 if device.type == "cpu" else 4096)
    own_generator = torch.Generator(device).manual_seed(0)  # the run's must not notice
    a, b = torch.randn(2, size, size, device=device, generator=own_generator).to(dtype)
    best_seconds = float("inf")
    for _ in range(6):  # the first one warms up and is never the best
        _synchronize(device)
        started_at = time.perf_counter()
        a @ b
        _synchronize(device)
        best_seconds = min(best_seconds, time.perf_counter() - started_at)
    return 2 * size**3 / best_seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
