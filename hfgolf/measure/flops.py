"""How many floating-point operations training takes, and how many the device could do.

Owns the count from the model's shapes, the table of devices and the measured peak where a device is not in it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hfgolf.model.modeling_golf import GolfForCausalLM


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token's forward and backward pass, by what they are spent on."""

    matrices: float
    """The weights of the blocks."""
    attention: float
    """Queries with keys and weights with values."""
    head: float
    recomputation: float
    """What gradient checkpointing would compute a second time: no useful work, so not in the others."""

    @property
    def useful(self) -> float:
        """The work of the model, which MFU counts (Chowdhery et al. 2022, appendix B)."""
        return self.matrices + self.attention + self.head


def training_flops_per_token(model: GolfForCausalLM, sequence_length: int) -> float:
    """Return the useful FLOPs of one token's forward and backward pass: what MFU counts."""
    return token_flops(model, sequence_length).useful


def token_flops(model: GolfForCausalLM, sequence_length: int) -> TokenFlops:
    """Count the FLOPs of one token in a sequence of this length; the model may lie on the meta device.

    Six for each weight that multiplies it (two forward, four backward: Kaplan et al. 2020, section 2.1), the head
    included and the embedding look-up not, and for attention's two products 6 x width x context a layer: the causal
    half of what PaLM counts (Chowdhery et al. 2022, appendix B), because the other half need not be computed. Norms,
    activations, softmax and the optimizer are left out, as there and by torch's FlopCounterMode.

    Recomputation is the forward pass of each block up to its last product, whose result the backward pass does not need
    (torch.utils.checkpoint stops there).
    """
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name)
    last_products = config.num_hidden_layers * config.hidden_size * config.intermediate_size
    attention = config.num_hidden_layers * config.hidden_size * sequence_length
    return TokenFlops(
        matrices=6.0 * matrices,
        attention=6.0 * attention,
        head=6.0 * config.vocab_size * config.hidden_size,
        recomputation=2.0 * (matrices - last_products) + 2.0 * attention,
    )


@dataclass(frozen=True)
class Device:
    """An accelerator as its data sheet describes it: dense peaks, without sparsity, in FLOP/s."""

    name: str
    """Words of the name that torch reports."""
    half: float
    """16 bits, sums in fp32."""
    tf32: float
    """fp32 operands rounded to TF32; as single where the hardware has none."""
    single: float
    memory_gb: int
    has_bf16: bool = True

    def peak_flops(self, precision: str) -> float:
        """Return the peak in a precision (no, bf16, fp16) as torch is set to multiply now."""
        if precision != "no":
            return self.half
        return self.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else self.single


# The first whose words are all in the name: what is special stands before what is general. Sources: NVIDIA's data
# sheets of the HGX B300 and B200 (a GPU's share), GB200 NVL72, GH200, H200, H100, A100, A40, A30, A10, L40S, L40, L4,
# V100 and T4; the appendices of its white papers on RTX Blackwell, Ada and Ampere GA102; AMD's of the MI300X. A800 and
# H800 compute as A100 and H100; of the H20 there are only the figures that resellers and the press agree on.
DEVICES = (
    Device("B300", 2250e12, 1125e12, 75e12, 288),
    Device("GB200", 2500e12, 1250e12, 80e12, 186),
    Device("B200", 2250e12, 1125e12, 75e12, 180),
    Device("GH200", 989e12, 494e12, 67e12, 96),
    Device("H200 NVL", 835e12, 417e12, 60e12, 141),
    Device("H200", 989e12, 494e12, 67e12, 141),
    Device("H100 NVL", 835e12, 417e12, 60e12, 94),
    Device("H100 PCIe", 756e12, 378e12, 51e12, 80),
    Device("H100", 989e12, 494e12, 67e12, 80),
    Device("H800", 989e12, 494e12, 67e12, 80),
    Device("H20", 148e12, 74e12, 44e12, 96),
    Device("A100 40GB", 312e12, 156e12, 19.5e12, 40),
    Device("A100", 312e12, 156e12, 19.5e12, 80),
    Device("A800", 312e12, 156e12, 19.5e12, 80),
    Device("A40", 149.7e12, 74.8e12, 37.4e12, 48),
    Device("A30", 165e12, 82e12, 10.3e12, 24),
    Device("A10", 125e12, 62.5e12, 31.2e12, 24),
    Device("L40S", 362e12, 183e12, 91.6e12, 48),
    Device("L40", 181e12, 90.5e12, 90.5e12, 48),
    Device("L4", 121e12, 60e12, 30.3e12, 24),
    Device("RTX 6000 Ada", 364.2e12, 182.1e12, 91.1e12, 48),
    Device("RTX A6000", 154.8e12, 77.4e12, 38.7e12, 48),
    Device("RTX 5090", 209.5e12, 104.8e12, 104.8e12, 32),
    Device("RTX 5080", 112.6e12, 56.3e12, 56.3e12, 16),
    Device("RTX 4090", 165.2e12, 82.6e12, 82.6e12, 24),
    Device("RTX 4080", 97.5e12, 48.7e12, 48.7e12, 16),
    Device("RTX 3090 Ti", 80e12, 40e12, 40e12, 24),
    Device("RTX 3090", 71e12, 35.6e12, 35.6e12, 24),
    Device("V100 PCIe", 112e12, 14e12, 14e12, 16, has_bf16=False),
    Device("V100", 125e12, 15.7e12, 15.7e12, 16, has_bf16=False),
    Device("T4", 65e12, 8.1e12, 8.1e12, 16, has_bf16=False),
    Device("MI300X", 1307e12, 653.7e12, 163.4e12, 192),
)
# Of a name, these do not make it another chip; "Laptop", "Ti", "MIG" or "Max-Q" would.
_MAKERS_AND_FORMS = re.compile(
    r"NVIDIA|AMD|Instinct|GeForce|Tesla|SXM\d?|PCIe?|HBM\w+|\d+GB?|Generation|AC", re.IGNORECASE
)


def find_device(name: str) -> Device | None:
    """Return the table's entry for a name such as torch reports, or a person types; None where it has none."""
    words = re.split(r"[\s-]+", name.strip().casefold())
    for device in DEVICES:
        own = device.name.casefold().split()
        rest = [word for word in words if word not in own]
        if set(own) <= set(words) and all(_MAKERS_AND_FORMS.fullmatch(word) for word in rest):
            return device
    return None


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the model of this machine's CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (" ".join(line.partition(":")[2].split()) for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the device's FLOP/s in a precision (no, bf16, fp16): from DEVICES, else measured by a product."""
    known = find_device(device_name(device)) if device.type == "cuda" else None
    if known:
        return known.peak_flops(precision)
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return highest_measured_peak(device, dtype)


def highest_measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s and return the highest of this and the earlier times, which a file remembers.

    Whatever else the machine was busy with can only have made a product slower, so that the highest is nearest to the
    peak, and two runs are compared with the same one.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    fp32 = torch.backends.cuda.matmul.fp32_precision if device.type == "cuda" and dtype == torch.float32 else ""
    key = f"{device_name(device)}, {dtype}{fp32}, {threads} threads, torch {torch.__version__}"
    path = _peaks_path()
    earlier = _read_peaks(path)
    peak = max(measured_peak_flops(device, dtype), earlier.get(key, 0.0))
    if peak != earlier.get(key):
        _write_peaks(path, {**earlier, key: peak})
    return peak


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


def _peaks_path() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "hfgolf" / "device_peaks.json"


def _read_peaks(path: Path) -> dict[str, float]:
    """Return what was measured earlier; nothing where the file is missing or damaged, so that it is written anew."""
    try:
        peaks = json.loads(path.read_text("utf-8"))
        return {str(key): float(peak) for key, peak in peaks.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_peaks(path: Path, peaks: dict[str, float]) -> None:
    """Replace the file; a run does without where it cannot be written."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(peaks, indent=1), "utf-8")
        unfinished.replace(path)
    except OSError:
        pass
