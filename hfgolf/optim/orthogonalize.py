"""Newton-Schulz: bring all singular values of a matrix close to 1, using only matmuls.

Owns the polynomials and the order of the matmuls. Does not know what the matrices are.
"""

from __future__ import annotations

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]

CLASSIC: Polynomial = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MIN_NORM = 1e-7  # as in torch.optim.Muon: a zero matrix stays zero


def newton_schulz_polynomials(coefficients: str, steps: int) -> tuple[Polynomial, ...]:
    """Return the coefficients (a, b, c) of each of `steps` iterations.

    classic: one polynomial, repeated (Jordan, "Muon: an optimizer for hidden layers", 2024). polar_express: five
    different polynomials, in order (Amsel et al., "The Polar Express", arXiv 2505.16932).

    Raises ValueError for an unknown name, or more than five steps of polar_express.
    """
    if coefficients == "classic":
        return (CLASSIC,) * steps
    if coefficients == "polar_express" and steps <= len(POLAR_EXPRESS):
        return POLAR_EXPRESS[:steps]
    raise ValueError(f"no {steps} steps of {coefficients!r}: classic, or polar_express with at most 5 steps")


def orthogonalize(matrices: Tensor, steps: int = 5, coefficients: str = "polar_express") -> Tensor:
    """Bring every singular value of each matrix close to 1 by Newton-Schulz iterations, in the matrices' dtype.

    matrices: (K, rows, cols); the result has the same shape, and the same bits on every call. With 5 steps in bf16, and
    a condition number up to 100, the singular values end in [0.8, 1.2] (polar_express) or [0.6, 1.25] (classic).

    For wide matrices, one iteration is X <- P X with P = a + b G + c G^2 and the Gram matrix G = X X^T of the short
    side. For tall ones it is X <- X P with G = X^T X, so that nothing is ever transposed in memory.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    short, long = sorted(matrices.shape[-2:])
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    if coefficients == "polar_express":
        norm = norm * 1.02  # the coefficients assume this headroom: rounding must not push the norm above 1
    # contiguous: with a transposed bf16 output buffer, oneDNN falls back to a matmul that is 500 times slower
    x = (matrices / norm.clamp(min=MIN_NORM)).contiguous()
    spare = torch.empty_like(x)
    gram, product, other = (x.new_empty(len(x), short, short) for _ in range(3))
    for run in _runs(newton_schulz_polynomials(coefficients, steps), short, long):
        torch.bmm(x.mT, x, out=gram) if is_tall else torch.bmm(x, x.mT, out=gram)
        _evaluate(run[0], gram, out=product)
        for polynomial in run[1:]:  # at most one
            torch.bmm(product, gram, out=other)
            torch.bmm(other, product, out=gram)  # the Gram matrix of P X, without computing P X
            _evaluate(polynomial, gram, out=other)
            torch.bmm(other, product, out=gram)
            product, gram = gram, product
        torch.bmm(x, product, out=spare) if is_tall else torch.bmm(product, x, out=spare)
        x, spare = spare, x
    return x


def _evaluate(polynomial: Polynomial, gram: Tensor, out: Tensor) -> None:
    a, b, c = polynomial
    torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=out)
    out.diagonal(dim1=-2, dim2=-1).add_(a)


def _runs(polynomials: tuple[Polynomial, ...], short: int, long: int) -> list[tuple[Polynomial, ...]]:
    """Group the iterations into pairs that share one Gram matrix, and single iterations.

    In units of short^3 multiplications, a pair costs 4 long/short + 10 and two single iterations cost 8 long/short + 4.
    """
    # Rounding can make the smallest eigenvalues of a bf16 Gram matrix negative (the smaller the matrix, the more), and
    # later products multiply them by up to a^2. Of the ways to group polar_express, 2-1-2 is the cheapest that keeps
    # singular values below 1.2 for any spectrum, from size 64 up; 3-2 diverges on some matrices with condition 100.
    lengths = [2, 1, *[2] * len(polynomials)] if long >= 2 * short >= 128 else [1] * len(polynomials)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    runs = [polynomials[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return [run for run in runs if run]
