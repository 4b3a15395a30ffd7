"""The table of several numbers of GPUs: its formulas against hand computation, and what must hold for any number."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfgolf.command_line import load_config
from hfgolf.config import RunConfig
from hfgolf.hardware import find_device
from hfgolf.optim.groups import build_optimizer
from hfgolf.optim.layout import layout
from hfgolf.tools import scaling
from hfgolf.tools.plan import machine_with, make_plan, meta_model
from hfgolf.tools.scaling import (
    CLIP_BYTES,
    OWN_BYTES,
    RULE_BYTES,
    Cluster,
    Scale,
    exposed_seconds,
    gradient_buckets,
    measured_loader,
    optimizer_work,
    scale,
)
from hfgolf.train.setup import bucket_megabytes

ROOT = Path(__file__).parents[2]
CONFIG = ["--config", str(ROOT / "configs" / "fineweb_124m.yaml"), "--train.mixed_precision=bf16"]
SMALL = ["--model.hidden_size=64", "--model.num_hidden_layers=1", "--model.num_attention_heads=4"]
SMALL += ["--batch.sequence_length=32", "--batch.tokens_per_step=256", "--batch.micro_batch_size=1"]
CLUSTER = Cluster(
    mfu=0.5,
    newton_schulz_flops=989e12,
    update_bytes=2,
    gpus_per_machine=1,
    link_bandwidth=450e9,
    network_bandwidth=1e9,
    memory_bandwidth=2e12,
    loader_tokens_per_second=1e5,
)


def scale_of(gpus: int, cluster: Cluster = CLUSTER, options: tuple[str, ...] = (), vocabulary: int = 50257) -> Scale:
    config = load_config([*CONFIG, *options]).config
    device = find_device("H100")
    assert device
    machine, model = machine_with(device, "bf16", gpus), meta_model(config, vocabulary, "cuda")
    return scale(config, model, make_plan(config, model, machine), machine, cluster)


def test_small_step_on_two_machines_in_closed_form():
    """One layer of 64 channels, 100 tokens of vocabulary, tied; 256 tokens per step, four micro-batches per GPU."""
    one = scale_of(2, options=tuple(SMALL), vocabulary=100)
    embedding, squares, mlp = 100 * 64, 4 * 64**2, 2 * 4 * 64**2
    norms = embedding_and_norms(tuple(SMALL), 100) - embedding
    flops = {"matrices": 6 * (squares + mlp), "attention": 6 * 64 * 32, "head": 6 * embedding}
    rate = 0.5 * 989e12
    assert one.pass_seconds == pytest.approx(128 * sum(flops.values()) / rate)
    backward_seconds = 32 * 2 / 3 * (flops["matrices"] + flops["attention"]) / rate
    gradients = 2 / 2 * 4 * (squares + mlp + embedding + norms)  # 2 (N - 1) / N of fp32
    assert one.gradient_seconds == pytest.approx(gradients / 1e9), "so few are one bucket, which nothing hides"
    assert one.hiding_bandwidth == pytest.approx(gradients / backward_seconds)
    gathered = 2 * squares  # bf16; of the two MLP matrices, of different shapes, each rank computes both
    assert one.gather_seconds == pytest.approx(gathered / 2 / 1e9)
    assert one.sent_bytes == pytest.approx(gradients + gathered / 2)
    # in 64^3: five iterations of 6 for each of two square matrices; two pairs of 26 and one iteration of 18 at 4 : 1
    newton_schulz = 64**3 * (2 * 30 + 2 * 70)
    moved = (squares + mlp) * (38 + 12) + (embedding + norms) * (28 + 12) + 24 * (squares // 2 + mlp)
    assert one.optimizer_seconds == pytest.approx(newton_schulz / rate + moved / 2e12)
    assert one.loader_seconds == pytest.approx(128 / 1e5)
    assert one.step_seconds == one.loader_seconds, "this loader is slower than the step"
    assert one.tokens_per_second == pytest.approx(2e5)


def embedding_and_norms(options: tuple[str, ...], vocabulary: int) -> int:
    model = meta_model(load_config([*CONFIG, *options]).config, vocabulary, "cuda")
    return sum(p.numel() for name, p in model.named_parameters() if not name.endswith("proj.weight"))


def test_more_gpus_are_faster_but_each_is_slower():
    cluster = dataclasses.replace(CLUSTER, gpus_per_machine=8, network_bandwidth=400e9, loader_tokens_per_second=1e9)
    scales = [scale_of(gpus, cluster) for gpus in (1, 2, 8, 16, 64)]
    assert scales[0].network_seconds == scales[0].sent_bytes == scales[0].hiding_bandwidth == 0
    for before, after in itertools.pairwise(scales):
        factor = after.gpus / before.gpus
        assert after.pass_seconds * factor == pytest.approx(before.pass_seconds)
        assert after.micro_batch_size * after.accumulation_steps * factor == before.micro_batch_size * (
            before.accumulation_steps
        )
        assert 1 < after.tokens_per_second / before.tokens_per_second < factor
        assert after.optimizer_seconds < before.optimizer_seconds
        for part in ("network", "optimizer"):
            assert after.shares[part] > before.shares[part]
        assert after.sent_bytes > before.sent_bytes and after.hiding_bandwidth > before.hiding_bandwidth


def test_slower_network_binds_only_between_machines():
    slow = dataclasses.replace(CLUSTER, gpus_per_machine=8, network_bandwidth=10e9, loader_tokens_per_second=1e9)
    fast = dataclasses.replace(slow, network_bandwidth=400e9)
    assert scale_of(8, slow) == scale_of(8, fast)
    assert scale_of(16, slow).network_seconds > 10 * scale_of(16, fast).network_seconds


def test_gradients_are_sent_in_buckets_behind_the_backward_pass():
    """GPT-2's size: the blocks have 85 M parameters, and the embedding comes last."""
    model = meta_model(load_config(CONFIG).config, 50257, "cuda")
    buckets = gradient_buckets(model)
    sizes, done = zip(*buckets, strict=True)
    assert sum(sizes) == 4 * sum(parameter.numel() for parameter in model.parameters())
    limit, embedding = 2**20 * bucket_megabytes(model), 4 * 50257 * 768
    assert len(buckets) > 2 and all(limit <= size < limit + 4 * 4 * 768**2 for size in sizes[:-1])
    assert embedding <= sizes[-1] < embedding + limit
    so_far = itertools.accumulate(sizes[:-1])
    assert done == pytest.approx([*(size / (sum(sizes) - embedding) for size in so_far), 1.0])


@pytest.mark.parametrize(
    ("exchanges", "ready_at", "waiting"),
    [
        ([1, 1, 1], [1, 2, 3], 1),  # only the last is not hidden
        ([2, 2, 2], [1, 2, 3], 4),  # they queue up: 3, 5, 7
        ([0.5, 0.1, 2], [1, 2, 3], 2),
        ([0, 0], [1, 2], 0),
    ],
)
def test_only_what_ends_after_the_pass_is_waited_for(exchanges, ready_at, waiting):
    assert exposed_seconds(exchanges, ready_at) == pytest.approx(waiting)


def test_checkpointing_gives_gradients_more_time_to_hide_behind():
    recomputed, plain = scale_of(16, options=("--model.gradient_checkpointing=true",)), scale_of(16)
    assert recomputed.pass_seconds > plain.pass_seconds
    assert recomputed.gradient_seconds < plain.gradient_seconds


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_muon_gathers(name):
    one = scale_of(64, options=(f"--optim.name={name}", "--optim.learning_rate=0.001"))
    assert one.gather_seconds == 0 < one.gradient_seconds


class Traffic(TorchDispatchMode):
    """Sum the bytes that operations read and write, except those of the products of matrices."""

    num_bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation.__name__.partition(".")[0]
        if operation.is_view or "empty" in name or name in ("bmm", "baddbmm", "detach"):
            return result
        written = [
            value for value, stated in zip(args, operation._schema.arguments, strict=False) if is_written(stated)
        ]
        read = [] if name.startswith(("_foreach_copy", "copy", "zero")) else written
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        targets = {id(leaf) for leaf in tree_leaves(written)}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in targets]
        pure = [leaf for leaf in inputs if id(leaf) not in targets]
        self.num_bytes += sum(leaf.nbytes for leaf in [*pure, *tree_leaves((read, written)), *outputs])
        return result


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def test_bytes_of_an_update_are_those_that_muon_moves():
    """Two layers of the real optimizer on the meta device, with what clips its gradients."""
    config = load_config([*CONFIG, "--model.num_hidden_layers=2", "--optim.newton_schulz_dtype=bf16"]).config
    config = config.replace(optim__weight_decay=0.1)
    model = meta_model(config, 64, "cuda")
    matrices = [(n, p) for n, p in model.named_parameters() if n.endswith("proj.weight")]
    kinds = {name: "matrix" for name, _ in matrices}
    optimizer = build_optimizer(matrices, config.optim, layout(model)["fused"], kinds)
    optimizer.create_state()
    for _, parameter in matrices:
        parameter.grad = torch.empty_like(parameter)
    with Traffic() as traffic:
        norm = torch.nn.utils.get_total_norm([parameter.grad for _, parameter in matrices])
        torch.nn.utils.clip_grads_with_norm_([parameter for _, parameter in matrices], 1.0, norm)
        optimizer.step()
    count = sum(parameter.numel() for _, parameter in matrices)
    assert traffic.num_bytes == pytest.approx(count * (CLIP_BYTES + RULE_BYTES["muon"] + OWN_BYTES), rel=0.01)


def test_matrices_are_divided_until_each_rank_has_one():
    """36 + 12 square matrices and 12 of each MLP shape, in GPT-2's size."""
    config = load_config(CONFIG).config
    model = meta_model(config, 50257, "cuda")
    works = {gpus: optimizer_work(config, model, gpus, 2) for gpus in (1, 12, 48, 64)}
    square, mlp = 30 * 768**3, 70 * 768**3
    assert works[1].flops == 48 * square + 24 * mlp
    assert works[12].flops == 4 * square + 2 * mlp
    assert works[48].flops == works[64].flops == square + 2 * mlp
    numbers = {gpus: work.gathered_bytes / 2 / 768**2 for gpus, work in works.items()}
    assert numbers == {1: 0, 12: 48 + 24 * 4, 48: 48 + 2 * 48 * 4, 64: 64 + 2 * 64 * 4}, "with padding"


def test_loader_is_measured(monkeypatch):
    monkeypatch.setattr(scaling, "LOADER_TOKENS", 100_000)
    monkeypatch.setattr(scaling, "LOADER_SECONDS", 0.05)
    config = RunConfig().replace(batch__sequence_length=64)
    assert 1e4 < measured_loader(config, 257, 2) < 1e10


@pytest.fixture
def script(run_script, monkeypatch):
    """Return a function that runs the script and returns what it said; with `fails`, on stderr."""
    monkeypatch.setattr(scaling, "LOADER_TOKENS", 100_000)
    monkeypatch.setattr(scaling, "LOADER_SECONDS", 0.01)

    def run(*arguments: object, fails: bool = False) -> str:
        said = run_script("plan.py", *arguments)
        assert said.status == (2 if fails else 0), said.err
        return said.err if fails else said.out

    return run


def test_script_prints_a_row_per_number_of_gpus(script, tiny_run):
    of_run = tiny_run(train__mixed_precision="bf16", batch__micro_batch_size="auto")
    options = [*of_run, "--device", "H100", "--gpus", "4,1,2"]
    said = script(*options)
    rows = [line.split() for line in said.splitlines() if re.match(r" +\d", line)]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert "predicted, not measured:" in said and "40% of the peak of H100, 989 TFLOP/s" in said
    assert "between 8 GPUs of a machine 450 GB/s each, between machines 400 GB/s" in said
    table = json.loads(script(*options, "--mfu", 0.2, "--network_gb_per_second", 1, "--gpus_per_machine", 1, "--json"))
    assert table["assumed"]["mfu"] == 0.2 and table["assumed"]["network_bandwidth"] == 1e9
    assert [one["gpus"] for one in table["scales"]] == [1, 2, 4]
    assert table["scales"][2]["shares"]["network"] > 0.5


def test_script_says_which_numbers_of_gpus_need_fsdp2(script, tiny_run):
    """Of 5.6 billion parameters, a copy and its training take 12 bytes each and more; under FSDP2, 8 of them remain."""
    of_run = tiny_run(
        train__mixed_precision="bf16", batch__micro_batch_size="auto", model__num_hidden_layers=28,
        model__hidden_size=4096, model__num_attention_heads=32, optim__learning_rate=0.01,
    )  # fmt: skip
    said = script(*of_run, "--device", "H100", "--gpus", "1,8")
    rows = [line.split() for line in said.splitlines() if re.match(r" +\d", line)]
    assert rows[0][4:7] == ["does", "not", "fit"] and rows[1][4] == "FSDP2"
    assert "too large for a full copy on each GPU; start with configs/accelerate/fsdp2.yaml" in said


def test_newton_schulz_is_as_fast_as_its_dtype(script, tiny_run):
    """A T4 has no bf16; an fp32 run on an H100 orthogonalizes in fp32, too."""
    cases = (("T4", "fp16", 8.1e12, 4), ("H100", "no", 67e12, 4), ("H100", "bf16", 989e12, 2))
    for device, precision, flops, size in cases:
        of_run = tiny_run(train__mixed_precision=precision, batch__micro_batch_size="auto")
        assumed = json.loads(script(*of_run, "--device", device, "--gpus", "1", "--json"))["assumed"]
        assert (assumed["newton_schulz_flops"], assumed["update_bytes"]) == (flops, size)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "1,two"], "--gpus: 'two' is not a whole number; allowed: 1 to 1048576."),
        (["--gpus", "1", "--measure"], "--gpus: predicts the speed of each row from --mfu, so --measure has no effect"),
        (["--gpus", "3", "--device", "H100"], "batch.tokens_per_step"),
    ],
)
def test_mistakes_are_one_line(script, tiny_run, options, said):
    error = script(*tiny_run(train__mixed_precision="bf16"), *options, fails=True)
    assert said in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_machine_without_a_gpu_is_told_to_name_one(script, tiny_run):
    assert "--gpus: there is no GPU here; name the one to plan for" in script(*tiny_run(), "--gpus", "1", fails=True)
