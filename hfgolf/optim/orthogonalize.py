"""Newton-Schulz: matrices whose singular values are all close to 1, by matrix products alone.

Owns the polynomials and the order of the products. Refuses to know what the matrices are: gradients, momentum, tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLASSIC = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SMALLEST_NORM = 1e-7  # as torch.optim.Muon: a matrix of zeros stays zeros


def newton_schulz_polynomials(coefficients: str, steps: int) -> tuple[tuple[float, float, float], ...]:
    """Return the (a, b, c) of each of `steps` iterations; ValueError for a name or a number of steps there is not.

    classic: Jordan, "Muon: an optimizer for hidden layers", 2024. polar_express: Amsel et al., "The Polar Express",
    arXiv 2505.16932, whose five polynomials differ and have an order.
    """
    if coefficients == "classic":
        return (CLASSIC,) * steps
    if coefficients == "polar_express" and steps <= len(POLAR_EXPRESS):
        return POLAR_EXPRESS[:steps]
    raise ValueError(f"no {steps} steps of {coefficients!r}: classic, or polar_express with at most 5 steps")


def fast_product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the hardware multiplies it natively, else float32: emulated, it is several times slower."""
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if is_fast else torch.float32


def orthogonalize(
    matrices: Tensor, steps: int = 5, coefficients: str = "polar_express", dtype: torch.dtype | None = None
) -> Tensor:
    """Bring every singular value of each matrix close to 1 by Newton-Schulz iterations.

    matrices: (K, rows, cols), or (rows, cols); the result has the same shape and dtype, and the same bits on every
    call. dtype: what the products are computed in, by default `fast_product_dtype`. With 5 steps and a condition
    number up to 100 the singular values end in [0.8, 1.16] (polar_express) or [0.6, 1.25] (classic).
    """
    if matrices.ndim == 2:
        return orthogonalize(matrices[None], steps, coefficients, dtype)[0]
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # the Gram matrix is that of the short side
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if coefficients == "polar_express":
        norm = norm * 1.02  # the headroom its coefficients were computed with: rounding must not pass 1
    # contiguous: into a transposed bf16 buffer, oneDNN falls back to a product that is 500 times slower
    x = (x / norm.clamp(min=SMALLEST_NORM)).to(dtype or fast_product_dtype(matrices.device)).contiguous()
    spare = torch.empty_like(x)
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])  # (K, short, short)
    polynomial = torch.empty_like(gram)
    for a, b, c in newton_schulz_polynomials(coefficients, steps):  # into four buffers: 10 % faster on a CPU
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=spare)
        x, spare = spare, x
    return (x.mT if is_tall else x).to(matrices.dtype)
