"""End a run: evaluate the best weights as the last ones were, export them, report and push."""

from __future__ import annotations

import copy
import json
import logging
import math
import shlex
import signal
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hfgolf.checkpoint.contents import EMA_NAME, WEIGHTS_NAME, first_nonfinite, first_of_ranks, load_weights
from hfgolf.checkpoint.store import (
    STATE_NAME,
    Rejected,
    best_checkpoint,
    newest_first,
    saved_step,
    step_of,
    verified_file,
)
from hfgolf.data.batches import explain_worker
from hfgolf.data.cache_folder import DamagedCacheError
from hfgolf.evaluate.bits_per_byte import compressor_scores
from hfgolf.evaluate.context import undo_compilation
from hfgolf.measure.memory import used_memory_bytes
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.export import export_model
from hfgolf.publish.model_card import model_card
from hfgolf.run.folder import FolderTakenError, RunFolder
from hfgolf.run.provenance import git_commit
from hfgolf.run.record import row_seconds
from hfgolf.system.command import own_command
from hfgolf.system.durable import list_files, write_text
from hfgolf.system.errors import UserError, refusal
from hfgolf.system.hardware import accelerator_name
from hfgolf.system.ranks import decide
from hfgolf.system.wording import describe_overlap, describe_texts, duration, gigabytes, one_line
from hfgolf.train.console import console
from hfgolf.train.feed import epoch, read_of_each
from hfgolf.train.run import Run
from hfgolf.train.saving import flush
from hfgolf.train.validation import evaluate_texts, final_budget, sample

logger = logging.getLogger(__name__)

_REAL_IDS = 256  # of the validation text, on which the native form is compared with the model


def report_failure(run: Run, raised: BaseException) -> BaseException:
    """Save and report what a failed run still can; return its error, explained if a loader worker raised it."""
    if isinstance(raised, FolderTakenError):
        return raised  # the files in the folder belong to another run now: write nothing
    run.error = explain_worker(raised)
    if isinstance(run.error, DamagedCacheError):
        run.event("damaged_cache", reason=str(run.error))
    flush(run)
    for end_hook in run.hooks.overriding("end"):
        try:
            end_hook(run, None)
        except Exception as error:  # must not hide why the run failed
            name = type(end_hook.__self__).__name__
            logger.warning("hook %s failed in `end`: %s: %s", name, type(error).__name__, one_line(error))
    return run.error


def exit_after_signal(run: Run) -> None:
    """End the process after a signal and its save; say how to resume."""
    console.close()
    name, step = signal.Signals(run.clock.stop_signal).name, saved_step(run.folder.checkpoints)
    if step is None:
        logger.info("stopped by %s at step %d; no checkpoint was saved, so a resume starts over", name, run.state.step)
    else:
        text = "stopped by %s at step %d; saved up to step %d; resume with the same command and --train.resume auto"
        logger.info(text, name, run.state.step, step)
    run.event("stopped", signal=name)
    end(run, None)
    raise SystemExit(128 + run.clock.stop_signal)


def conclude(run: Run) -> dict[str, Any]:
    """Evaluate, export, report and push the best weights of the run; return the summary (as in summary.json)."""
    if run.accelerator.is_main_process:
        run.folder.hold()
    step, damaged_best = _take_best_weights(run)
    with run.hooks.weights(run):
        summary = _summarize(run, step, damaged_best)
        end(run, summary)
    return summary


def end(run: Run, summary: dict[str, Any] | None) -> None:
    """End the hooks, the log and the process group: the last thing that all processes do together."""
    run.hooks.call("end", run, summary)
    if run.metrics is not None:
        run.metrics.close()
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


def _summarize(run: Run, step: int, damaged_best: int | None) -> dict[str, Any]:
    """Return the summary of the model's weights, those of `step`; the main process also exports them."""
    evaluation, columns = run.final_evaluations.get(step) or evaluate_texts(run, final_budget(run))
    summary: dict[str, Any] = {
        "run": run.config.run.name,
        "step": step,
        "steps": run.state.step,
        "weights": "ema" if run.config.optim.ema_export else "raw",
        "is_best": step == run.state.best_step,
        "skipped_steps": run.state.skipped_steps,
        "rollbacks": run.state.rollbacks,
        "tokens": run.state.tokens,
        "epochs": epoch(run),
        **columns,
        "val_perplexity": evaluation.perplexity,
        "tokens_per_second": statistics.median(run.speeds) if run.speeds else math.nan,
        "train_seconds": run.state.elapsed_seconds,
        "predicted_memory_bytes": run.predicted_memory_bytes,
        "parameters": run.raw_model.num_parameters(),
        "device": accelerator_name(),
        "commit": git_commit(),
        "commits": run.folder.commits(),
        "model": str(run.folder.model),
    }
    if run.init_from:
        summary["init_from"] = run.init_from | run.evaluation_at_start
    for name, (tokens, epochs) in read_of_each(run).items():
        summary |= {f"tokens/{name}": tokens, f"epochs/{name}": epochs}
        if num_bytes := run.tokens.texts[name].train.num_bytes:  # of shards, nobody counts them
            summary[f"bytes/{name}"] = round(epochs * num_bytes)
    if run.tokens.val.is_target is not None:
        summary["targets"] = "the assistant's turns"
    if run.config.model.architecture != "golf":
        summary["architecture"] = type(run.raw_model).__name__
    summary |= run.tokens.val_notes
    if damaged_best:
        summary["damaged_best_step"] = damaged_best
    undo_compilation(run.raw_model)
    model = run.whole_model()
    if model is not None and run.accelerator.is_main_process:
        summary |= compressor_scores(run.tokens)
        text = sample(run, 100, model)
        console.now("exporting")
        summary |= {} if text is None else {"sample": text}
        summary |= run.stopwatch.row()
        summary["peak_memory_bytes"] = used_memory_bytes(run.accelerator.device)  # so far, for the report
        run.hooks.call("before_export", run, summary)
        _export(run, summary, model)
        console.close()
        show_summary(summary)
    return summary


def _export(run: Run, summary: dict[str, Any], model: PreTrainedModel) -> None:
    """Write the model's folder and summary.json. Raises UserError, saying what is left, if the disk is full."""
    from hfgolf.publish.gguf import has_gguf  # late: it imports seven architectures

    try:
        picture = run.folder.report.with_suffix("") / "loss.png"
        pictures = [picture] if picture.is_file() else []
        tokenizer = run.tokens.tokenizer
        exported_model, said = exported_form(run, model)
        logger.info("exported as %s", said)
        is_for_llama_cpp = has_gguf(exported_model, tokenizer)
        card = model_card(run.resolved.config, summary, exported_model, pictures, is_for_llama_cpp)
        export_model(exported_model, tokenizer, run.folder.model, card, pictures)
        # without the README, which a push edits
        exported = sorted(set(run.folder.model.iterdir()) - {run.folder.model / "README.md"})
        summary["peak_memory_bytes"] = used_memory_bytes(run.accelerator.device)  # with report and export
        summary["files"] = list_files(run.folder.model, exported)
        write_text(run.folder.summary, json.dumps(summary, indent=1))
    except (OSError, SafetensorError) as error:
        saved = saved_step(run.folder.checkpoints)
        found = refusal(error)
        first = found[1] if found and "No space" not in found[0] else "free disk space"
        advice = (
            f"no checkpoint could be written either, so the weights are lost; {first} and train again"
            if saved is None
            else f"checkpoints hold step {saved} of {run.state.step}; {first}, then run the same command"
            " with --train.resume auto"
        )
        raise UserError(
            f"run.output_dir: cannot write the model to {run.folder.model} ({one_line(error)}); {advice}."
        ) from None


def exported_form(run: Run, model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """Return the model in the form that its folder is to hold, and what that is. It may share its tensors."""
    from hfgolf.publish.convert import in_best_form  # late: it imports seven architectures

    val = run.tokens.val
    return in_best_form(_plain(model), val.read(np.arange(min(_REAL_IDS, len(val)))).tolist())


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """Return a Golf model with the same tensors whose pass is its own: accelerate's has the training's precision."""
    if not isinstance(model, GolfForCausalLM):
        return model
    with torch.random.fork_rng([]):
        plain = GolfForCausalLM(copy.deepcopy(model.config))
    plain.load_state_dict(model.state_dict(), assign=True)  # no copies of the tensors
    plain.tie_weights()
    return plain.eval()


def show_summary(summary: dict[str, Any]) -> None:
    """Print the results of the run and how to load its model."""
    weights = f"{'averaged weights of ' if summary['weights'] == 'ema' else ''}step {summary['step']}"
    counted = f" of {summary['targets']}" if "targets" in summary else ""
    share = summary.get("val_share_read", 1.0)  # earlier versions read all
    part = "whole validation set of" if share == 1 else f"first {share:.0%} of the validation set,"
    extent = f"{part} {summary['val_tokens']:,} tokens{counted}"
    logger.info(f"\nvalidation loss  {summary['val_loss']:.4f} nats per token ({weights}, {extent})")
    logger.info(f"bits per byte    {summary['val_bits_per_byte']:.4f} over {summary['val_bytes']:,} bytes")
    for line in describe_texts(summary):
        logger.info("                 %s", line)
    if "xz_bits_per_byte" in summary:
        logger.info("                 %s", beside_compressors(summary))
    start = summary.get("init_from", {})
    if start.get("val_tokens") != summary["val_tokens"]:  # a run that went on with another budget
        start = {}
    if "val_bits_per_byte" in start:
        logger.info(f"                 {start['val_bits_per_byte']:.4f} before the first step")
    if "old_val_bits_per_byte" in start and "old_val_bits_per_byte" in summary:
        old, before = summary["old_val_bits_per_byte"], start["old_val_bits_per_byte"]
        logger.info(
            f"old text         {old:.4f} bits per byte, {before:.4f} before the first step ({old - before:+.4f})"
        )
    if "tokenizer_loss" in summary:
        logger.info("                 %s", summary["tokenizer_loss"])
    if overlap := describe_overlap(summary):
        logger.info("                 %s", overlap)
    logger.info("tokens/s         %s (median)", f"{summary['tokens_per_second']:,.0f}")
    if "peak_memory_bytes" in summary:
        predicted, peak = (gigabytes(summary[f"{kind}_memory_bytes"]) for kind in ("predicted", "peak"))
        logger.info("memory           predicted %s, peak %s", predicted, peak)
    if seconds := row_seconds(summary):
        parts = ", ".join(f"{kind} {duration(value)}" for kind, value in seconds.items() if value)
        logger.info("time             %s: %s", duration(sum(seconds.values())), parts)
    if "sample" in summary:
        logger.info("sample           %s", summary["sample"].replace("\n", "\n                 "))
    folder = RunFolder(Path(summary["model"]).parent)
    logger.info("run folder       %s", folder.path)
    if folder.report.is_file():
        logger.info("report           %s", folder.report)
    trust = ", trust_remote_code=True" if (folder.model / "modeling_golf.py").is_file() else ""
    logger.info('in Python        AutoModelForCausalLM.from_pretrained("%s"%s)', summary["model"], trust)
    command, name = own_command(), shlex.quote(str(folder.path))
    logger.info("next             %s generate %s\n%s%s chat %s", command, name, 17 * " ", command, name)


def beside_compressors(summary: dict[str, Any]) -> str:
    """Say what the bits per byte mean, beside those of gzip and xz."""
    scores = {name: summary[f"{name}_bits_per_byte"] for name in ("gzip", "xz")}
    best = min(scores, key=lambda name: scores[name])
    share = summary["val_bits_per_byte"] / scores[best] - 1
    num_bytes = summary["compressed_bytes"]
    text = "the same text" if num_bytes == summary["val_bytes"] else f"its first {num_bytes:,} bytes"
    return (
        f"{abs(share):.0%} {'fewer' if share < 0 else 'more'} than {best} needs: gzip -9 {scores['gzip']:.2f},"
        f" xz -9e {scores['xz']:.2f}, for {text}"
    )


def _take_best_weights(run: Run) -> tuple[int, int | None]:
    """Load the weights to export into the model: the best ones, or the last ones if the best are damaged on disk.

    Under optim.ema_export, takes the averaged weights. If the last weights are not finite, takes the newest undamaged
    checkpoint. Returns the step of the weights, and the step of the best if they are damaged. Raises UserError if no
    weights are left.
    """
    run.accelerator.wait_for_everyone()  # until the main process has written the files that all ranks read
    averaged = run.config.optim.ema_export
    name = EMA_NAME if averaged else WEIGHTS_NAME
    nonfinite = first_of_ranks(first_nonfinite(run.raw_model.named_parameters()))
    file, damaged_best = decide(lambda: _find_weights(run, name, nonfinite is None))
    if file:
        weights, step = load_file(file), step_of(file.parent)
        if run.config.model.overrides.get("loop") is not None:
            state = json.loads((file.parent / STATE_NAME).read_text())
            run.raw_model.config.loop_active = state.get("loop_active", True)
        logger.info("using the weights of step %d", step)
    elif nonfinite:
        raise UserError(
            f"train: {nonfinite} holds nonfinite values, and there is no undamaged checkpoint, so nothing was"
            f" exported; lower optim.learning_rate (now {run.config.optim.learning_rate:g}) and start again."
        )
    else:
        weights, step = run.ema.state_dict() if averaged and run.ema else {}, run.state.step
    load_weights(run.raw_model, weights)
    return step, damaged_best


def _find_weights(run: Run, name: str, has_last: bool) -> tuple[Path | None, int | None]:
    """Return the file with the weights to export, and the step of the best weights if those are damaged.

    name: the file's name in a checkpoint. has_last: the model's own weights are usable; then the file may be None,
    which means these.
    """
    folder, state, damaged_best = run.folder.checkpoints, run.state, None
    best = best_checkpoint(folder) if state.best_step != state.step else None
    if best is not None:
        try:
            return verified_file(best, name), None
        except Rejected as rejected:
            damaged_best = step_of(best)
            instead = f"the last ones, of step {state.step}" if has_last else "the newest undamaged ones"
            logger.warning("the best weights, of step %d, are damaged: %s; using %s", damaged_best, rejected, instead)
    for checkpoint in [] if has_last else newest_first(folder):
        try:
            return verified_file(checkpoint, name), damaged_best
        except Rejected as rejected:
            logger.warning("%s is damaged: %s", checkpoint.name, rejected)
    return None, damaged_best
