"""The loop of the model begins when it is due: as an event, in the saved configs, and in a compiled graph."""

from __future__ import annotations

import json

import pytest

from hfgolf.measure.flops import training_flops_per_token
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.run.metrics import read_metrics
from hfgolf.train import loop

LOOP = {"model__overrides.loop": "[0, 1, 3]", "train__max_steps": 6}


def test_recurrence_starts_at_its_share_of_the_run(run, tiny_run, edit_run, monkeypatch):
    seen, real = [], loop.accumulate_gradients

    def spy(run_):
        config = run_.raw_model.config
        flops = training_flops_per_token(run_.raw_model, 32)
        seen.append((config.loop_active, run_.meter.flops_per_second_of_peak / flops))
        return real(run_)

    monkeypatch.setattr(loop, "accumulate_gradients", spy)
    folder = run(tiny_run(**LOOP, schedule__loop_start=0.5))
    assert [is_active for is_active, _ in seen] == [False] * 3 + [True] * 3
    per_peak = [ratio for _, ratio in seen]
    assert per_peak == pytest.approx([per_peak[0]] * 6, rel=1e-9)  # MFU counts the FLOPs of each step
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [(event["step"], event["active"]) for event in metrics.events if event["event"] == "loop"] == [
        (0, False),
        (3, True),
    ]
    # a checkpoint's config says how its weights were trained, and so does the exported one
    for step, is_active in ((3, False), (6, True)):
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        assert json.loads((checkpoint / "config.json").read_text())["loop_active"] is is_active
        assert GolfForCausalLM.from_pretrained(checkpoint).config.loop_active is is_active
    assert GolfForCausalLM.from_pretrained(folder / "model").config.loop_active


def test_best_weights_from_before_the_recurrence_are_exported_without_it(run, tiny_run, validation_losses):
    validation_losses([1.0, 2.0])
    folder = run(tiny_run(**LOOP, schedule__loop_start=0.5))
    assert json.loads((folder / "summary.json").read_text())["step"] == 3
    assert not GolfForCausalLM.from_pretrained(folder / "model").config.loop_active


@pytest.mark.slow
def test_compiled_run_starts_the_recurrence_on_time(run, tiny_run):
    losses = []
    for name, compile_ in (("eager", "false"), ("compiled", "true")):
        folder = run(tiny_run(**LOOP, schedule__loop_start=0.5, train__compile=compile_, run__name=name))
        rows = read_metrics(folder / "metrics.jsonl").rows
        losses.append([loss for row in rows for loss in row["train_losses"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
