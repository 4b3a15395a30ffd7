"""Newton-Schulz against the SVD polar factor, and its symmetries."""

import pytest
import torch

from hfgolf.optim.muon import fast_product_dtype, newton_schulz_polynomials, orthogonalize

# smallest and largest singular value, relative distance to the polar factor; measured at condition 100:
# polar_express 0.86 to 1.14 and 0.105, classic 0.68 to 1.20 and 0.184
BANDS = {"polar_express": (0.8, 1.16, 0.13), "classic": (0.6, 1.25, 0.25)}


def matrices_of_condition(condition: float, count: int, rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(count, rows, cols, generator=generator), full_matrices=False)
    return u @ torch.diag(torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), min(rows, cols))) @ v


def polar_factor(matrices: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    return u @ v


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 32), (32, 96), (96, 32)])
@pytest.mark.parametrize("condition", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("coefficients", BANDS)
def test_singular_values_and_distance_to_the_polar_factor_lie_in_the_band(coefficients, condition, shape, dtype):
    smallest, largest, distance = BANDS[coefficients]
    matrices = matrices_of_condition(condition, 3, *shape)
    result = orthogonalize(matrices, coefficients=coefficients, dtype=dtype)
    values = torch.linalg.svdvals(result)
    assert values.min() >= smallest
    assert values.max() <= largest
    if coefficients == "polar_express" or condition == 100.0:  # classic leaves equal values at one end of its band
        assert relative_distance(result, polar_factor(matrices)) <= distance


def test_a_convergent_iteration_is_the_same_polar_factor():
    """(2, -1.5, 0.5) twelve times, written here, is nearly exact: it agrees with the SVD and so bounds both."""
    matrices = matrices_of_condition(100.0, 2, 48, 96)
    exact = matrices / torch.linalg.matrix_norm(matrices, keepdim=True)
    for _ in range(12):
        gram = exact @ exact.mT
        exact = 2 * exact - 1.5 * gram @ exact + 0.5 * gram @ gram @ exact
    assert relative_distance(exact, polar_factor(matrices)) < 0.02
    assert relative_distance(orthogonalize(matrices, dtype=torch.float32), exact) < 0.13


@pytest.mark.parametrize("coefficients", BANDS)
def test_diagonal_matrix_follows_the_scalar_polynomial(coefficients):
    values = [3.0, 4.0]
    headroom = 1.02 if coefficients == "polar_express" else 1.0
    expected = []
    for value in values:
        x = value / (5.0 * headroom)  # the Frobenius norm of diag(3, 4) is 5
        for a, b, c in newton_schulz_polynomials(coefficients, 5):
            x = a * x + b * x**3 + c * x**5
        expected.append(x)
    result = orthogonalize(torch.diag(torch.tensor(values)), coefficients=coefficients, dtype=torch.float32)
    torch.testing.assert_close(result, torch.diag(torch.tensor(expected)), rtol=1e-5, atol=1e-6)


def test_tall_is_the_transpose_of_wide():
    wide = torch.randn(2, 24, 80, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonalize(wide.mT), orthogonalize(wide).mT, rtol=1e-5, atol=1e-5)


def test_the_gram_matrix_is_that_of_the_short_side(monkeypatch):
    sides, bmm = [], torch.bmm

    def recorded(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sides.append(out.shape[-1])
        return bmm(a, b, out=out)

    monkeypatch.setattr(torch, "bmm", recorded)
    orthogonalize(torch.ones(1, 40, 8))
    orthogonalize(torch.ones(1, 8, 40))
    assert sides == [8] * 10  # the long side gives the same result and costs 25 times as much


def test_a_batch_is_its_matrices_one_by_one():
    batch = torch.randn(4, 32, 48, generator=torch.Generator().manual_seed(2))
    batch[1] *= 1e4  # each matrix is normalised by its own norm
    one_by_one = torch.stack([orthogonalize(matrix) for matrix in batch])
    torch.testing.assert_close(orthogonalize(batch), one_by_one, rtol=1e-5, atol=1e-5)


def test_scale_of_the_input_does_not_matter_and_input_stays():
    matrix = torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(3))
    before = matrix.clone()
    torch.testing.assert_close(orthogonalize(matrix), orthogonalize(1024 * matrix), rtol=1e-5, atol=1e-5)
    assert torch.equal(matrix, before)


def test_same_bits_on_every_call():
    matrices = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(4))
    assert torch.equal(orthogonalize(matrices), orthogonalize(matrices))


def test_zeros_stay_zeros():
    assert torch.equal(orthogonalize(torch.zeros(2, 8, 12)), torch.zeros(2, 8, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_has_the_dtype_of_the_input(dtype):
    assert orthogonalize(torch.ones(1, 4, 6, dtype=dtype)).dtype == dtype


def test_unknown_coefficients_and_a_sixth_polar_step_are_refused():
    with pytest.raises(ValueError, match="cubic"):
        orthogonalize(torch.ones(1, 2, 2), coefficients="cubic")
    with pytest.raises(ValueError, match="at most 5"):
        orthogonalize(torch.ones(1, 2, 2), steps=6)


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_products_are_bf16_on_a_cpu_only_where_it_is_native(monkeypatch, avx512, amx):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    expected = torch.bfloat16 if avx512 or amx else torch.float32
    assert fast_product_dtype(torch.device("cpu")) == expected


@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)])
def test_products_read_and_write_contiguous_memory(monkeypatch, shape):
    """Into a transposed bf16 buffer oneDNN multiplies without vector instructions: a step took 13 s instead of 0.16."""
    seen = []

    def watch(product):
        def watched(*arguments, **options):
            seen.append(options["out"].is_contiguous() and arguments[0].is_contiguous())
            return product(*arguments, **options)

        return watched

    for name in ("bmm", "baddbmm"):
        monkeypatch.setattr(torch, name, watch(getattr(torch, name)))
    orthogonalize(torch.randn(shape), dtype=torch.bfloat16)
    assert len(seen) == 15 and all(seen)
