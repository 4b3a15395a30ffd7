"""Muon on two processes, replicated and sharded, compared with one process."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hfgolf.config.sections import OptimSection
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim import muon as muon_module
from hfgolf.optim.groups import build_optimizer
from hfgolf.optim.muon import Muon

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 3
SHAPES = [(30, 10), (8, 24), (24, 8), (10, 10), (10, 10), (8, 24), (10, 10), (8, 24)]
REPLICATED = {
    "bf16": {"newton_schulz_dtype": "bf16"},
    "fp32": {"newton_schulz_dtype": "fp32"},
    "all options": {"normuon_beta2": 0.9, "row_equilibration": True, "cautious_weight_decay": True},
}
SHARDED = {
    "muon": OptimSection(newton_schulz_dtype="fp32"),
    "muon with all options": OptimSection(
        newton_schulz_dtype="fp32", normuon_beta2=0.9, row_equilibration=True, cautious_weight_decay=True
    ),
    "adamw": OptimSection(name="adamw", learning_rate=0.003),
    "sgd": OptimSection(name="sgd", learning_rate=0.1, cautious_weight_decay=True),
    "muon in turns, in bf16": OptimSection(newton_schulz_dtype="fp32", muon_every_steps=2, state_dtype="bf16"),
}


def train_replicated(case: str, process_group: dist.ProcessGroup | None) -> tuple[list[torch.Tensor], int]:
    """Return the weights after some steps, and the number of matrices this process orthogonalized in one step."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    splits = [(10, 10, 10), *[None] * (len(SHAPES) - 1)]
    group = {"params": params, "splits": splits}
    optimizer = Muon([group], weight_decay=0.1, process_group=process_group, **REPLICATED[case])
    worked_on = 0
    real = muon_module.orthogonalize

    def counted(matrices: torch.Tensor, *arguments: object) -> torch.Tensor:
        nonlocal worked_on
        worked_on += len(matrices)
        return real(matrices, *arguments)

    muon_module.orthogonalize = counted
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    muon_module.orthogonalize = real
    return [param.detach() for param in params], worked_on // STEPS


def train_sharded(case: str, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return the weights after some steps. Each rank has its part of the batch; some weights have odd row counts."""
    muon_module.PIECE_ELEMENTS = 100  # fewer than any weight has
    torch.manual_seed(0)
    model = GolfForCausalLM(
        GolfConfig(
            vocab_size=17,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=33,
            tie_word_embeddings=False,
        )
    )
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)

    def build() -> Muon:
        return build_optimizer(model, SHARDED[case])

    optimizer = build()
    for step in range(STEPS):
        ids = torch.randint(0, 17, (4, 12), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(ranks)[rank]
        model(input_ids=ids, labels=ids).loss.backward()
        if step == STEPS - 1 and ranks > 1:  # the last step uses a resumed optimizer
            optimizer = resumed(model, optimizer, build())
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:  # otherwise a distributed checkpoint would store it twice
        for param, state in optimizer.state.items():
            places = [getattr(value, "placements") for value in (param, *state.values()) if value.ndim]  # noqa: B009
            assert all(place == places[0] for place in places)
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}


def resumed(model: torch.nn.Module, optimizer: Muon, new: Muon) -> Muon:
    """Return the new optimizer with the old one's state, transferred like torch's distributed checkpoint does."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    set_optimizer_state_dict(model, new, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    return new


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    replicated = {case: train_replicated(case, dist.group.WORLD) for case in REPLICATED}
    sharded = {case: train_sharded(case, rank, 2) for case in SHARDED}
    torch.save({"replicated": replicated, "sharded": sharded}, folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)  # torch 2.13 once aborted while it took its groups down, after the results were on disk


@pytest.fixture(scope="module")
def of_both_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", REPLICATED)
def test_sharing_muon_over_ranks_matches_one_process_bitwise(of_both_ranks, case):
    expected, alone = train_replicated(case, None)
    for results in of_both_ranks:
        params, worked_on = results["replicated"][case]
        assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
        assert (alone, worked_on) == (10, 6)  # 3 of 6 square matrices, 2 of 3 wide ones, the tall one


@pytest.mark.parametrize("case", SHARDED)
def test_sharded_parameters_train_like_whole_ones(of_both_ranks, case):
    expected = train_sharded(case, 0, 1)
    for results in of_both_ranks:
        torch.testing.assert_close(results["sharded"][case], expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
