"""Evaluate the model during training: its validation loss, and text sampled from it."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from transformers import PreTrainedModel

from hfgolf.config.sections import RunConfig, TrainSection
from hfgolf.data.batches import Stream, evaluation_extent
from hfgolf.data.chat import stop_ids
from hfgolf.evaluate.bits_per_byte import Evaluation
from hfgolf.evaluate.context import uncompiled
from hfgolf.evaluate.loss import evaluate_loss
from hfgolf.evaluate.sample import generate_ids, generate_text
from hfgolf.optim.shards import reshard
from hfgolf.system.redact import redact
from hfgolf.system.wording import every, one_line
from hfgolf.train.console import console
from hfgolf.train.run import Run

logger = logging.getLogger(__name__)


def validate(run: Run, before_batch: Callable[[], None]) -> dict[str, Any]:
    """Evaluate the weights, and their averages if there are any; return columns of the row.

    The loss on train.eval_tokens tokens judges the step. If no evaluation follows, such as when this one used up the
    minutes, evaluates `final_budget`, too: then the columns are those of it, and `subset_*` those to compare with
    earlier rows.
    """
    train, budget = run.config.train, run.config.eval_tokens
    row, exported = _evaluate_all_weights(run, budget, before_batch)
    judged_loss = exported[0].loss
    run.clock.agree_on_end()
    is_last = run.clock.is_over() or _stops_early(train, run.state.evals_after(judged_loss))
    final, subset = final_budget(run), {}
    if is_last and not _read_alike(run, budget, final):
        subset = {f"subset_{key}": value for key, value in row.items()}
        row, exported = _evaluate_all_weights(run, final, before_batch)
    if is_last or _read_alike(run, budget, None):
        run.final_evaluations = {run.state.step: exported}
    run.state.judge(judged_loss)
    return row | subset


def final_budget(run: Run, last_step: float | None = None) -> int | None:
    """Return the tokens that the evaluation at the last step may read, None for all: alike on all ranks and on resume.

    last_step: None: now. By default, the budget follows from the tokens that the run has trained on by then. With
    model.init_from, from those that it will have: the evaluation before the first step reads the same text, or the two
    would not compare. If minutes limit such a run, nobody knows them then, and both read train.eval_tokens.
    """
    config, state = run.config, run.state
    if run.init_from:
        last_step = run.step_limit
    steps = 0 if last_step in (None, math.inf) else int(last_step - state.step)
    is_unknown = run.init_from and config.train.max_minutes
    return config.final_eval_tokens(0 if is_unknown else state.tokens + steps * config.batch.tokens_per_step)


def evaluation_steps(run: Run, last_step: float) -> tuple[float, float]:
    """Return how many steps take as long as all evaluations from now on, and as those at the last step.

    Per token, an evaluation takes a third of the work of a training step (only the forward pass).
    """
    budgets = run.config.eval_tokens, final_budget(run, last_step)
    each, final = (evaluation_extent(run.tokens.val, budget)[0] for budget in budgets)
    per_step = 3 * run.config.batch.tokens_per_step
    tokens, at_the_end = evaluated_tokens(run.config, each, final, last_step, run.state.step)
    return tokens / per_step, at_the_end / per_step


def evaluated_tokens(config: RunConfig, each: int, final: int, last_step: float, step: int = 0) -> tuple[int, int]:
    """Return the tokens of all evaluations after a step, and of those at the last step.

    each, final: of an evaluation during the run, and of the one that its figures are from.
    """
    every, at_the_end = config.train.eval_every_steps, each + (final if final > each else 0)
    times = math.ceil(last_step / every) - 1 - step // every
    return (times * each + at_the_end) * config.eval_passes, at_the_end * config.eval_passes


def describe_validation(run: Run) -> str:
    """Return what an evaluation reads, and its share of the compute, in one line."""
    config, val = run.config, run.tokens.val
    each, whole = evaluation_extent(val, config.eval_tokens)[0], evaluation_extent(val)[0]
    steps, per_step = config.train.eval_every_steps, config.batch.tokens_per_step
    share = each * config.eval_passes / (3 * per_step * steps)
    tokens = f"all {whole:,} tokens" if each == whole else f"{each:,} of {whole:,} tokens"
    at_the_end = ""
    is_open = config.train.max_minutes and config.train.final_eval_tokens == "auto" and not run.init_from
    if is_open and each < whole:
        at_the_end = "; at the last step, as many as take 5% of all compute"
    elif (final := evaluation_extent(val, final_budget(run, run.step_limit))[0]) > each:
        at_the_end = f"; {'all of them' if final == whole else f'{final:,}'} at the last step"
    return f"{tokens} {every(steps, 'step')}, {share:.0%} of their compute{at_the_end}"


def _read_alike(run: Run, budget: int | None, other: int | None) -> bool:
    """Return whether evaluations with two budgets read the same tokens."""
    streams = [run.tokens.val] if run.old_text is None else [run.tokens.val, run.old_text]
    return all(evaluation_extent(stream, budget) == evaluation_extent(stream, other) for stream in streams)


def _evaluate_all_weights(
    run: Run, budget: int | None, before_batch: Callable[[], None]
) -> tuple[dict[str, Any], tuple[Evaluation, dict[str, Any]]]:
    """Return columns of the row, and of the weights that an export would take, what `evaluate_texts` does."""
    with exported_weights(run):
        exported = evaluate_texts(run, budget, before_batch)
    row = exported[1]
    if run.ema is not None and not run.config.optim.ema_export:
        with run.ema.applied(), run.hooks.weights(run):
            averaged = evaluate(run, budget, before_batch)
        row = row | {"val_loss_ema": averaged.loss, "val_bits_per_byte_ema": averaged.bits_per_byte}
    return row, exported


def validate_start(run: Run, before_batch: Callable[[], None]) -> None:
    """Evaluate the weights of model.init_from on what the last evaluation will read, and record that as an event.

    It is no candidate for the best step: a run exports weights that it has trained.
    """
    budget = final_budget(run)
    before, columns = evaluate_texts(run, budget, before_batch)
    old = f", old text {columns['old_val_bits_per_byte']:.4f} bits per byte" if run.old_text is not None else ""
    logger.info(f"step 0  val loss {before.loss:.4f} ({before.bits_per_byte:.4f} bits per byte){old}")
    run.evaluation_at_start = columns
    run.event("init_from", **run.init_from or {}, **columns)


def evaluate_texts(
    run: Run, budget: int | None, before_batch: Callable[[], None] = lambda: None
) -> tuple[Evaluation, dict[str, Any]]:
    """Evaluate the model's current weights on the validation text, and on data.old_text if there is any.

    Returns the evaluation of the former, and columns of the row of both; of each text of a mixture, they are
    "val_loss/NAME" and the others.
    """
    evaluation = evaluate(run, budget, before_batch)
    figures = {"val_loss": "loss", "val_bits_per_byte": "bits_per_byte", "val_tokens": "num_tokens"}
    figures["val_bytes"] = "num_bytes"
    columns = {column: getattr(evaluation, figure) for column, figure in figures.items()}
    columns["val_share_read"] = evaluation_extent(run.tokens.val, budget)[0] / evaluation_extent(run.tokens.val)[0]
    for name, text in evaluation.texts.items():
        columns |= {f"{column}/{name}": getattr(text, figure) for column, figure in figures.items()}
    if run.old_text is not None:
        old = evaluate(run, budget, before_batch, run.old_text)
        columns |= {"old_val_loss": old.loss, "old_val_bits_per_byte": old.bits_per_byte}
    return evaluation, columns


def evaluate(
    run: Run,
    budget_tokens: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
    stream: Stream | None = None,
) -> Evaluation:
    """Evaluate the model's current weights on the first `budget_tokens` validation tokens, or on all of them.

    before_batch: called before each batch. To end the evaluation, it raises on all processes before the same batch.
    stream: the tokens; None: the run's validation text. The console shows how far it is.
    """
    stream = run.tokens.val if stream is None else stream
    length, done = run.config.batch.sequence_length, itertools.count()
    rows_per_batch = run.micro_batch_size * run.accelerator.num_processes
    num_batches = math.ceil(evaluation_extent(stream, budget_tokens)[0] / length / rows_per_batch)

    def before_each() -> None:
        console.progress(next(done) / num_batches)
        before_batch()

    with run.stopwatch.charge("evaluate"):
        try:
            return evaluate_loss(
                run.raw_model,
                stream,
                run.accelerator,
                sequence_length=length,
                batch_size=run.micro_batch_size,
                budget_tokens=budget_tokens,
                before_batch=before_each,
            )
        finally:
            reshard(run.raw_model)  # before anything changes its weights


def should_stop_early(run: Run) -> bool:
    """Return whether train.patience_evals evaluations have passed without improvement."""
    return _stops_early(run.config.train, run.state.evals_without_improvement)


def _stops_early(train: TrainSection, evals_without_improvement: int) -> bool:
    return train.patience_evals is not None and evals_without_improvement >= train.patience_evals


@contextmanager
def exported_weights(run: Run) -> Iterator[None]:
    """Give the model the weights to export inside a `with` block: averaged (ema_export), and as hooks want them."""
    with averaged_weights(run), run.hooks.weights(run):
        yield


def averaged_weights(run: Run) -> AbstractContextManager[None]:
    """Return a context in which the model has the averaged weights under ema_export, and else its own."""
    return run.ema.applied() if run.ema is not None and run.config.optim.ema_export else nullcontext()


def write_sample(run: Run) -> None:
    """Sample train.sample_tokens tokens from the model and record the text as an event."""
    max_new_tokens, is_main = run.config.train.sample_tokens, run.accelerator.is_main_process
    if max_new_tokens is None or not (is_main or run.is_sharded):
        return
    with exported_weights(run):
        model = run.whole_model()
        text = sample(run, max_new_tokens, model) if is_main and model is not None else None
    if text is not None:
        run.event("sample", text=text)


def sample(run: Run, max_new_tokens: int, model: PreTrainedModel) -> str | None:
    """Return text sampled from the model, the same for the same weights; None, with a warning, if sampling fails.

    Never raises: a sample must not end a run, and recovery.py handles nonfinite weights.
    """
    try:
        with run.stopwatch.charge("evaluate"), uncompiled(model):
            # redacted, because the model may have memorized a secret from its corpus
            return redact(_sampled_text(run, max_new_tokens, model))
    except Exception as error:
        reason = one_line(error)[:200]
    logger.warning("no sample at step %d: %s", run.state.step, reason)
    run.event("sample_failed", reason=reason)
    return None


def _sampled_text(run: Run, max_new_tokens: int, model: PreTrainedModel) -> str:
    """Return train.sample_prompt continued, or with conversations the first validation prompt and the answer."""
    tokenizer, seed, stream = run.tokens.tokenizer, run.config.run.seed, run.tokens.val
    if stream.is_target is None:
        return generate_text(model, tokenizer, run.config.train.sample_prompt, max_new_tokens=max_new_tokens, seed=seed)
    prompt = stream.tokens[: int(stream.is_target.argmax())].tolist()
    prompt = prompt[-(run.config.batch.sequence_length // 2) :]  # leaves room for the answer
    ids = generate_ids(
        model, tokenizer, prompt, max_new_tokens=max_new_tokens, seed=seed, eos_token_id=stop_ids(tokenizer)
    )
    return str(tokenizer.decode(ids))
