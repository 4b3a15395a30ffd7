"""Bad steps: what is skipped, rolled back, reduced or given up, and that each is reported once."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faults import column, events, losses, rows, same, train_on_two
from safetensors.torch import load_file
from sharded import needs_fsdp2, shard
from tiny_export import exported_weights
from torch import Tensor

from hfgolf.checkpoint.state import TrainState
from hfgolf.config.parse import load_config
from hfgolf.data.batches import block_starts, sample_hash
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.muon import Muon
from hfgolf.optim.shards import local_shards
from hfgolf.system.errors import UserError
from hfgolf.train import loop
from hfgolf.train.feed import blocks_per_epoch, halve_micro_batch
from hfgolf.train.recovery import judge

pytestmark = pytest.mark.slow

# except at the end; an evaluation would save a checkpoint if it was the best
NO_EVALUATION = {"train__eval_every_steps": 100}
BAD = "model.layers.0.mlp.up_proj.weight"  # what conftest.py spoils


def hashes(folder: Path) -> list[str]:
    return column(folder, "sample_hashes")


def hashes_of(data_steps: list[int], num_blocks: int) -> list[str]:
    """Return the hash of each step's batch in a tiny run with the default seed, 8 sequences per step."""
    return [
        f"{sample_hash(block_starts(1337, 8 * step + np.arange(8), num_blocks, 32)) % 2**64:016x}"
        for step in data_steps
    ]


def saved_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "checkpoints" / "latest" / "train_state.json").read_text())


def test_nan_step_is_skipped_and_reported(run, tiny_run, spoil_gradients, caplog):
    """Two bad steps, not in a row, so that max_skipped_steps 2 is not reached."""
    runs = spoil_gradients(lambda step: step in (1, 3))
    folder = run(tiny_run(optim__ema_decay=0.9, train__max_skipped_steps=2, batch__micro_batch_size=4))
    assert [row["skipped_steps"] for row in rows(folder)] == [0, 1, 1, 2, 2, 2]
    assert [row["grad_norm"] is None for row in rows(folder)] == [False, True, False, True, False, False]
    assert [(row["event"], row["step"]) for row in events(folder)] == [("skipped_step", 2), ("skipped_step", 4)]
    for event, data_step in zip(events(folder), (1, 3), strict=True):
        blocks = block_starts(1337, 8 * data_step + np.arange(8), blocks_per_epoch(runs[0]), 32).tolist()
        assert (event["block_starts"], event["first_parameter"]) == (blocks, BAD)
        lines = [line for line in caplog.messages if line.startswith(f"step {data_step + 1}: the gradient is not")]
        assert len(lines) == 1
        assert f"first in {BAD}, blocks from tokens {', '.join(map(str, blocks[:6]))} and 2 more" in lines[0]
        assert lines[0].endswith("update skipped (1 of 2 in a row)")
    assert saved_state(folder)["rollbacks"] == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["skipped_steps"], summary["rollbacks"]) == (6, 2, 0)


@pytest.mark.parametrize(
    ("save_every", "back_at", "left_out"),
    [
        pytest.param(4, 4, [4, 5, 6], id="checkpoint-before-the-bad-ones"),
        pytest.param(3, 6, [6], id="checkpoint-between-the-bad-ones"),
    ],
)
def test_repeated_nan_steps_roll_back_and_exclude_their_blocks(
    run, tiny_run, spoil_gradients, caplog, save_every, back_at, left_out
):
    """Every other batch is read once and in order. test_all_state.py resumes such a run."""
    excluded = [[8 * left_out[0], 8 * (left_out[-1] + 1)]]
    runs = spoil_gradients(lambda step: step in (1, 4, 5, 6))
    options = {
        "schedule__name": "constant",
        "train__max_skipped_steps": 3,
        "train__save_every_steps": save_every,
        **NO_EVALUATION,
        "model__dropout": 0.1,
    }
    straight = run(tiny_run(run__name="straight", train__max_steps=12, **options))
    assert [row["step"] for row in rows(straight)] == list(range(1, 13))
    read = [step for step in range(20) if step not in left_out][:12]
    assert hashes(straight) == hashes_of(read, blocks_per_epoch(runs[0]))
    assert [row["learning_rate"] for row in rows(straight)] == [0.02] * back_at + [0.01] * (12 - back_at)
    (event,) = [event for event in events(straight) if event["event"] == "rollback"]
    assert (event["step"], event["from_step"]) == (back_at, 7)
    assert (event["excluded_blocks"], event["learning_rate_scale"]) == (excluded, 0.5)
    line = f"rollback 1 of 3: from step 7 to step-{back_at:06d}; learning rates times 0.5, {8 * len(left_out)} blocks"
    assert len([message for message in caplog.messages if message.startswith(line)]) == 1
    expected = {"excluded_blocks": excluded, "learning_rate_scale": 0.5, "rollbacks": 1, "skipped_steps": 4}
    assert {key: saved_state(straight)[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("options", "bad", "step", "told"),
    [
        ({"train__max_rollbacks": 2, "train__save_every_steps": 2}, 2, 4, "2 rollbacks did not help; lower optim"),
        ({}, 0, 2, "there is no checkpoint to roll back to"),
        ({"train__rollback_on": "[spike]"}, 3, 5, "train.rollback_on does not include nonfinite; lower optim"),
    ],
)
def test_permanent_nan_ends_with_a_diagnosis_in_one_line(run, tiny_run, spoil_gradients, options, bad, step, told):
    runs = spoil_gradients(lambda step: step >= bad)
    with pytest.raises(UserError) as error:
        run(tiny_run(train__max_skipped_steps=2, **options | NO_EVALUATION))
    message, state = str(error.value), runs[0].state
    assert message.startswith(f"train: step {step}: the gradient is not finite") and "\n" not in message
    last = 8 * (step - 1) + sum(end - begin for begin, end in state.excluded_blocks)
    starts = block_starts(1337, last + np.arange(8), blocks_per_epoch(runs[0]), 32)[:6]
    assert f"first in {BAD}, blocks from tokens {', '.join(map(str, starts))} and 2 more; {told}" in message
    if options.get("train__max_rollbacks"):
        assert (state.excluded_blocks, state.learning_rate_scale) == ([[16, 32], [32, 48]], 0.25)
    assert runs[0].folder.report.is_file(), "a failed run has a report too"


def test_fp16_scale_search_is_reported_without_a_rollback(run, tiny_run, shared_run, fp16_on_cpu, caplog):
    first_norm = rows(shared_run())[0]["grad_norm"]
    caplog.clear()
    fp16_on_cpu(2.0**24)
    folder = run(tiny_run(train__max_steps=20, train__mixed_precision="fp16", train__max_skipped_steps=1))
    skipped = [row["step"] for row in rows(folder) if row["grad_norm"] is None]
    assert skipped, "a scale of 2^24 overflows fp16"
    # the steps before it were skipped, so the weights are the initial ones: the same norm up to fp16 and the batch
    norms = [row["grad_norm"] for row in rows(folder) if row["grad_norm"] is not None]
    assert norms[0] == pytest.approx(first_norm, rel=0.2), "unscaled"
    assert rows(folder)[-1]["grad_norm"] is not None and losses(folder)[-1] < losses(folder)[0]
    assert rows(folder)[-1]["skipped_steps"] == len(skipped)
    assert [(event["event"], event["step"]) for event in events(folder)] == [("fp16_overflow", n) for n in skipped]
    assert [event["loss_scale"] for event in events(folder)][:2] == [2.0**23, 2.0**22][: len(skipped)]
    lines = [line for line in caplog.messages if "fp16 overflow" in line]
    assert len(lines) == len(skipped) and lines[0].endswith("update skipped, loss scale lowered to 8,388,608")
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == len(skipped)


def test_fp16_nan_at_any_scale_counts_as_a_bad_step(run, tiny_run, fp16_on_cpu, spoil_gradients):
    fp16_on_cpu(8.0)
    spoil_gradients(lambda step: True)
    options = {"train__max_steps": 20, "train__save_every_steps": 20, "train__max_skipped_steps": 2, **NO_EVALUATION}
    with pytest.raises(UserError, match=r"^train: step 4: .*there is no checkpoint"):  # scales 4, 2, then 1 and 1/2
        run(tiny_run(train__mixed_precision="fp16", **options))


@pytest.fixture
def break_weights(monkeypatch):
    """Return a function that sets two weights to infinity right before the first save at a step."""

    def install(at_step: int, value: float = math.inf) -> None:
        real_save = loop.save
        broken = []

        def save(run_: Any) -> None:
            if run_.state.step == at_step and not broken:
                broken.append(at_step)
                weight = run_.raw_model.get_parameter(BAD).data
                weight[0, 0], weight[1, 0] = value, -value  # one of the two is positive for any token
            real_save(run_)

        monkeypatch.setattr(loop, "save", save)

    return install


def test_nonfinite_weights_are_not_saved(run, tiny_run, break_weights, caplog):
    break_weights(4)
    folder = run(tiny_run(train__save_every_steps=2, train__eval_every_steps=2, train__max_skipped_steps=9))
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "latest", "step-000002"]
    assert (checkpoints / "latest").resolve().name == "step-000002"
    for step in (4, 6):  # the failed last save is reported too
        reason = f"checkpoint of step {step} not written: {BAD} holds nonfinite values"
        assert len([line for line in caplog.messages if line.startswith(reason)]) == 1
    failed = [event for event in events(folder) if event["event"] == "save_failed"]
    assert [event["step"] for event in failed] == [4, 6]
    exported = exported_weights(folder / "model")
    best = load_file(checkpoints / "best" / "model.safetensors")
    assert all(torch.equal(exported[name], best[name]) for name in best)
    assert json.loads((folder / "summary.json").read_text())["step"] == 2


def test_rollback_skips_a_checkpoint_that_yields_no_good_step(run, tiny_run, break_weights, caplog):
    break_weights(4, 1e38)  # finite, so it is saved; any pass through it overflows
    folder = run(tiny_run(train__save_every_steps=2, train__max_skipped_steps=2, train__max_steps=8, **NO_EVALUATION))
    rollbacks = [event for event in events(folder) if event["event"] == "rollback"]
    assert [(event["step"], event["from_step"]) for event in rollbacks] == [(4, 6), (2, 6)]
    assert "no good step followed step-000004; going further back" in caplog.messages
    assert [row["step"] for row in rows(folder)] == list(range(1, 9))
    assert all(row["grad_norm"] is not None for row in rows(folder))


def test_rollback_may_reuse_a_checkpoint_that_yielded_good_steps(run, tiny_run, spoil_gradients):
    """What the first rollback excluded stays excluded."""
    runs = spoil_gradients(lambda step: step in (6, 7, 9, 10))
    folder = run(tiny_run(train__max_skipped_steps=2, train__max_steps=9, **NO_EVALUATION))
    rollbacks = [event for event in events(folder) if event["event"] == "rollback"]
    assert [(event["step"], event["from_step"]) for event in rollbacks] == [(6, 8), (6, 9)]
    assert rollbacks[-1]["excluded_blocks"] == saved_state(folder)["excluded_blocks"] == [[48, 64], [72, 88]]
    assert hashes(folder) == hashes_of([*range(6), 8, 11, 12], blocks_per_epoch(runs[0]))


@pytest.fixture
def shake_weights(edit_run):
    """Return a function that spoils the embeddings right before a step: the loss jumps and stays high.

    Once, or with until_rollback at each step from there on until a rollback.
    """

    def install(before_step: int, until_rollback: bool = False) -> None:
        shaken = []

        def edit(run_: Any) -> None:
            def shake(module: Any, arguments: Any) -> None:
                is_due = run_.state.step >= before_step - 1 and not run_.state.rollbacks
                if module.training and is_due and (until_rollback or not shaken):
                    shaken.append(before_step)
                    weight = run_.raw_model.get_input_embeddings().weight.data
                    weight.copy_(weight.roll(1, 0) * (1 if until_rollback else 30))

            run_.raw_model.register_forward_pre_hook(shake)

        edit_run(edit)

    return install


@pytest.mark.parametrize("cause", ["spike", "divergence"])
def test_a_lasting_rise_of_the_loss_rolls_back_to_before_it_if_configured(run, tiny_run, shake_weights, caplog, cause):
    """A spike excludes all batches since it began, a divergence only the last one."""
    shake_weights(39, until_rollback=cause == "divergence")
    assert load_config(tiny_run()).config.train.rollback_on == ["nonfinite"]
    options = {"optim__adamw_learning_rate": 0.001, "train__save_every_steps": 10, "train__keep_last": 9}
    options |= {"train__max_steps": 80, "train__rollback_on": f"[nonfinite, {cause}]", **NO_EVALUATION}
    folder = run(tiny_run(**options))
    (rollback,) = [event for event in events(folder) if event["event"] == "rollback"]
    last = rollback["from_step"]
    assert (rollback["cause"], rollback["step"]) == (cause, 30) and last > 39
    assert rollback["excluded_blocks"] == [[8 * (38 if cause == "spike" else last - 1), 8 * last]]
    assert "step-000040 was saved after the problem began; going further back" in caplog.messages
    said = f"step {last}: the {'training' if cause == 'spike' else 'median training'} loss is "
    assert len([line for line in caplog.messages if line.startswith(said)]) == 1
    after = losses(folder)
    assert len(after) == 80 and max(after[30:]) < 1.2 * after[29]
    assert json.loads((folder / "summary.json").read_text())["rollbacks"] == 1


def test_loss_watch_distinguishes_spikes_from_divergence():
    def verdicts(looks_for: str, loss: Any) -> list[tuple[int, str]]:
        state, told = TrainState(), []
        for step in range(1, 201):
            state.step = step
            told.append((step, judge(loss(step), state, {looks_for})[0]))
        return [(step, verdict) for step, verdict in told if verdict]

    def healthy(step: int) -> float:
        return 2 + 3.5 * math.exp(-step / 30) + 0.05 * math.sin(step)

    assert verdicts("spike", healthy) == verdicts("divergence", healthy) == []
    assert verdicts("spike", lambda step: healthy(step) + 2 * (step == 90)) == [(90, "spike")]
    diverging = verdicts("divergence", lambda step: healthy(step) + max(0, step - 100) / 50)
    assert diverging[0][1] == "divergence" and 120 < diverging[0][0] < 160
    assert verdicts("divergence", lambda step: 5.5 + step / 20)[0][0] < 60, "from the start"


def spoil_the_second_rank() -> None:
    """Make gradients of rank 1 NaN on three batches, and keep the weights that each rank ends with."""
    real_set_up, real_conclude = loop.set_up, loop.conclude

    def set_up(*arguments: Any) -> Any:
        run = real_set_up(*arguments)

        def hook(gradient: Tensor) -> Tensor:
            bad = run.state.next_position // 8 in (1, 4, 5)
            return gradient * math.nan if bad and os.environ["RANK"] == "1" else gradient

        run.raw_model.get_parameter(BAD).register_hook(hook)
        return run

    def conclude(run: Any) -> Any:
        torch.save(run.raw_model.state_dict(), run.folder.path / f"rank{os.environ['RANK']}.pt")
        return real_conclude(run)

    loop.set_up, loop.conclude = set_up, conclude


def spoil_the_second_shard() -> None:
    """Under FSDP2, make only rank 1's shard of a gradient NaN on the same batches: rank 0's is finite."""
    shard()
    real = loop.accumulate_gradients

    def accumulate_gradients(run: Any) -> Any:
        bad = run.state.next_position // 8 in (1, 4, 5)
        result = real(run)
        if bad and os.environ["RANK"] == "1":
            run.raw_model.get_parameter(BAD).grad.to_local().mul_(math.nan)
        return result

    loop.accumulate_gradients = accumulate_gradients


def break_the_second_shard() -> None:
    """Under FSDP2, set a weight of rank 1's shard to infinity right before the first save at step 4."""
    shard()
    real_save, broken = loop.save, []

    def save(run: Any) -> None:
        if run.state.step == 4 and not broken and os.environ["RANK"] == "1":
            broken.append(4)
            (weight,) = local_shards([run.raw_model.get_parameter(BAD).data])
            weight[0, 0], weight[1, 0] = math.inf, -math.inf
        real_save(run)

    loop.save = save


@needs_fsdp2
@pytest.mark.distributed
def test_nonfinite_weights_of_one_rank_are_not_saved_and_are_rolled_back(tiny_run, tmp_path):
    options = {"train__save_every_steps": 2, "train__max_skipped_steps": 2, "train__max_steps": 7, **NO_EVALUATION}
    train_on_two(tiny_run(**options, batch__micro_batch_size=4), tmp_path / "output", break_the_second_shard)
    said, folder = (tmp_path / "output").read_text(), tmp_path / "runs" / "tiny"
    assert said.count(f"checkpoint of step 4 not written: {BAD} holds nonfinite values") == 1
    assert [event["event"] for event in events(folder)].count("rollback") == 1
    assert [row["step"] for row in rows(folder)] == list(range(1, 8))
    assert all(row["grad_norm"] is not None for row in rows(folder))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(spoil_the_second_rank, id="ddp"),
        pytest.param(spoil_the_second_shard, id="fsdp2", marks=needs_fsdp2),
    ],
)
def test_nan_on_one_rank_is_skipped_and_rolled_back_on_all(run, tiny_run, tmp_path, spoil_gradients, prepare):
    options = {"train__max_skipped_steps": 2, "train__save_every_steps": 4, "train__max_steps": 8}
    options |= {"batch__micro_batch_size": 4}
    runs = spoil_gradients(lambda step: step in (1, 4, 5))
    one = run(tiny_run(run__name="one", **options))
    train_on_two(tiny_run(run__name="two", **options), tmp_path / "output", prepare)
    two = one.with_name("two")
    assert hashes(two) == hashes(one) == hashes_of([0, 1, 2, 3, 6, 7, 8, 9], blocks_per_epoch(runs[0]))
    skipped = [[row["skipped_steps"] for row in rows(folder)] for folder in (one, two)]
    assert skipped[0] == skipped[1] == [0, 1, 1, 1, 3, 3, 3, 3]
    told = [[(event["event"], event["step"]) for event in events(folder)] for folder in (one, two)]
    assert told[0] == told[1] == [("skipped_step", 2), ("skipped_step", 5), ("skipped_step", 6), ("rollback", 4)]
    assert {event["first_parameter"] for event in events(two) if event["event"] == "skipped_step"} == {BAD}
    if prepare is spoil_the_second_rank:
        assert same(*(torch.load(two / f"rank{rank}.pt") for rank in (0, 1)))
    else:
        assert losses(two) == pytest.approx(losses(one), rel=1e-5)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("could not create a primitive"),
]


@pytest.fixture
def lack_memory(monkeypatch):
    """Return a function that makes training passes with more than `most` sequences raise, after `spared` passes."""

    def install(error: Exception, most: int, spared: int = 0) -> None:
        real = GolfForCausalLM.forward
        passes = []

        def forward(self: GolfForCausalLM, input_ids: Tensor, *arguments: Any, **options: Any) -> Any:
            if self.training and torch.is_grad_enabled() and len(input_ids) > most:
                passes.append(input_ids)
                if len(passes) > spared:
                    raise error
            return real(self, input_ids, *arguments, **options)

        monkeypatch.setattr(GolfForCausalLM, "forward", forward)

    return install


@pytest.mark.parametrize(
    ("error", "size", "spared", "sizes", "at_step"),
    [
        pytest.param(OUT_OF_MEMORY[1], 8, 0, [[8, 4], [4, 2]], 0, id="at-the-start"),
        pytest.param(OUT_OF_MEMORY[0], 4, 5, [[4, 2]], 2, id="in-the-middle-of-step-3"),
    ],
)
def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else(
    run, tiny_run, shared_run, lack_memory, caplog, error, size, spared, sizes, at_step
):
    small = shared_run(batch__micro_batch_size=2)
    caplog.clear()
    lack_memory(error, most=2, spared=spared)
    folder = run(tiny_run(run__name="halved", batch__micro_batch_size=size))
    assert hashes(folder) == hashes(small)
    assert losses(folder) == pytest.approx(losses(small), rel=1e-5)
    assert [row["tokens"] for row in rows(folder)] == [256 * step for step in range(1, 7)]
    assert [event["event"] for event in events(folder)] == ["out_of_memory"] * len(sizes)
    assert [event["micro_batch_size"] for event in events(folder)] == sizes
    assert {event["step"] for event in events(folder)} == {at_step}
    lines = [line for line in caplog.messages if line.startswith(f"out of memory at step {at_step + 1} with ")]
    assert len(lines) == len(sizes)
    assert "continuing with 2 and 4 accumulation steps" in lines[-1]


def test_out_of_memory_with_one_sequence_is_one_line(run, tiny_run, lack_memory):
    lack_memory(MemoryError("Unable to allocate 2 GiB"), most=0)  # as numpy says it
    with pytest.raises(UserError, match=r"^train: out of memory with a micro-batch of 1 \(Unable to .*[^\n]*$"):
        run(tiny_run(batch__micro_batch_size=2))


def test_out_of_memory_for_the_optimizer_is_one_line(run, tiny_run, monkeypatch):
    def create_state(self: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Muon, "create_state", create_state)
    with pytest.raises(UserError, match=r"^memory: not enough for the optimizer's state, .*train\.low_memory"):
        run(tiny_run())


def test_out_of_memory_on_one_rank_ends_with_the_setting_to_resume(run, tiny_run, edit_run):
    """The other process waits with micro-batches of the old size."""
    runs: list[Any] = []
    edit_run(runs.append)
    run(tiny_run(train__max_steps=1, batch__micro_batch_size=4))
    runs[0].accelerator = SimpleNamespace(num_processes=2)
    advice = r"continue with --batch\.micro_batch_size 2 --train\.resume auto\.$"
    with pytest.raises(UserError, match=rf"^train: out of memory with a micro-batch of 4 \(no room\); {advice}"):
        halve_micro_batch(runs[0], "no room")


def test_other_errors_are_not_treated_as_out_of_memory(run, tiny_run, lack_memory):
    lack_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), most=0)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(tiny_run())


@pytest.mark.parametrize(
    ("exported", "file", "losses", "best"),
    [("true", "ema", [3.0, 2.0, 2.5, 2.0], 4), ("false", "model", [1.0, 3.0, 2.0, 2.0, 2.5, 2.5, 1.0], 2)],
)
def test_the_weights_that_are_exported_select_the_best_step_by_their_own_loss(
    run, tiny_run, validation_losses, exported, file, losses, best
):
    """The raw weights are best at step 2, the averages at step 4. If these are exported, only they are evaluated."""
    validation_losses(losses)
    folder = run(tiny_run(optim__ema_decay=0.9, optim__ema_export=exported, train__eval_every_steps=2))
    checkpoint = folder / "checkpoints" / "best"
    assert checkpoint.resolve().name == f"step-{best:06d}"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == best and (summary.get("weights") == "ema") == (file == "ema")
    weights = exported_weights(folder / "model")
    saved = load_file(checkpoint / f"{file}.safetensors")
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert ("the moving-average weights" in (folder / "model" / "README.md").read_text()) == (file == "ema")


def test_an_average_without_memory_is_the_weights(run, tiny_run):
    """optim.ema_decay 0 is a decay, not the absence of an average."""
    folder = run(tiny_run(optim__ema_decay=0, train__max_steps=3))
    (row,) = [row for row in rows(folder) if row["val_loss"] is not None]
    assert row["val_loss_ema"] == row["val_loss"]
    averages, raw = (load_file(folder / "checkpoints/latest" / f"{name}.safetensors") for name in ("ema", "model"))
    assert averages and all(torch.equal(averages[name], raw[name]) for name in averages)
