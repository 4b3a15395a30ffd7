"""The state of a run in training: a record of what setup.py built, passed around by the loop and its modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfgolf.checkpoint.contents import Checkpointer
from hfgolf.checkpoint.state import TrainState
from hfgolf.config.parse import ResolvedConfig
from hfgolf.config.sections import RunConfig
from hfgolf.data.batches import Stream
from hfgolf.data.token_cache import TokenCache
from hfgolf.evaluate.bits_per_byte import Evaluation
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.ema import Ema
from hfgolf.optim.shards import full_tensor
from hfgolf.run.folder import RunFolder
from hfgolf.run.metrics import Metrics, MetricsFile
from hfgolf.system.errors import UserError
from hfgolf.system.stopwatch import Stopwatch
from hfgolf.train.clock import Clock
from hfgolf.train.decisions import Decisions
from hfgolf.train.meter import Meter


@dataclass
class Run:
    """Everything that the loop uses."""

    decisions: Decisions
    micro_batch_size: int
    """Sequences per forward pass of one process; less after memory ran out."""
    is_compiled: bool | None
    """None until it is decided (compilation.py)."""
    folder: RunFolder
    accelerator: Accelerator
    tokens: TokenCache
    raw_model: PreTrainedModel
    """The unwrapped model; `model` may be wrapped (DDP)."""
    model: nn.Module
    optimizer: Any
    ema: Ema | None
    state: TrainState
    checkpoints: Checkpointer
    stopwatch: Stopwatch
    hooks: Any
    """The Hooks; hooks.py imports this file."""
    metrics: MetricsFile | None
    """metrics.jsonl; None on processes other than the main one."""
    predicted_memory_bytes: int
    """Predicted peak: of this process, as `top` shows it, on a CPU; of its tensors on a GPU."""
    step_limit: float = field(init=False)
    """Steps at which max_steps, max_tokens or max_epochs end the run; infinity if only max_minutes does."""
    clock: Clock = field(init=False)
    meter: Meter = field(init=False)
    batches: Iterator[dict[str, Tensor]] = field(default_factory=lambda: iter(()))
    """This process's micro-batches, in order (see feed.py)."""
    first_step: int = 0
    """Step at which this session began: 0, or the step of the checkpoint it resumed from."""
    is_stepping: bool = False
    """True once the loop runs: processes then wait for each other in the middle of a step."""
    final_evaluations: dict[int, tuple[Evaluation, dict[str, Any]]] = field(default_factory=dict)
    """{step: the latest evaluation that reads what the last one does, and its columns}, so that the end of the run need
    not repeat it."""
    old_text: Stream | None = None
    """Tokens of data.old_text, which the weights of model.init_from know; None if it is not given."""
    earlier: Metrics = field(default_factory=lambda: Metrics([], []))
    """The rows and events of earlier sessions, or up to a rollback, for `Hook.start`; empty on other processes."""
    speeds: list[float] = field(default_factory=list)
    """Tokens/s of each row so far."""
    evaluation_at_start: dict[str, Any] = field(default_factory=dict)
    """The evaluation of the weights of model.init_from, by column of metrics.jsonl; empty without them."""
    error: BaseException | None = None
    """What a failed run ended with."""

    @property
    def config(self) -> RunConfig:
        """The config, with what was decided; micro_batch_size and is_compiled may still be open in it."""
        return self.decisions.config

    @property
    def resolved(self) -> ResolvedConfig:
        """The config with all that was decided, for what records the run."""
        stated, sources = self.config.batch.micro_batch_size, dict(self.decisions.sources)
        values: dict[str, Any] = {"batch__micro_batch_size": self.micro_batch_size}
        if stated != self.micro_batch_size:
            sources["batch.micro_batch_size"] = "auto" if stated == "auto" else "out of memory"
        if self.config.train.compile == "auto" and self.is_compiled is not None:
            values["train__compile"], sources["train.compile"] = self.is_compiled, "auto"
        return ResolvedConfig(self.config.replace(**values), sources)

    @property
    def init_from(self) -> dict[str, str | None] | None:
        """The weights that the run started from: name, revision (None: not from the Hub) and sha256; None: random."""
        return self.checkpoints.identity.get("init_from")

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per process and optimizer step."""
        return self.accelerator.gradient_accumulation_steps

    @property
    def golf_model(self) -> GolfForCausalLM:
        """The unwrapped model, for what only Golf has. Raises UserError if it is another architecture."""
        if not isinstance(self.raw_model, GolfForCausalLM):
            raise UserError(f"model.architecture: this needs golf, not {self.config.model.architecture}.")
        return self.raw_model

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only its shards of the weights (FSDP2)."""
        return self.accelerator.distributed_type == DistributedType.FSDP

    def whole_model(self) -> PreTrainedModel | None:
        """Return the model with all of its weights. All processes call it.

        If it is sharded, that is a copy in the memory of the main process's host, and None on the other processes.
        """
        if not self.is_sharded:
            return self.raw_model
        model = None
        if self.accelerator.is_main_process:
            with torch.random.fork_rng([]):
                model = GolfForCausalLM(copy.deepcopy(self.golf_model.config))
        with torch.no_grad():
            own = {} if model is None else model.state_dict()
            for name, tensor in self.golf_model.state_dict(keep_vars=True).items():
                whole = full_tensor(tensor)  # all processes; one tensor at a time on the device
                if model is not None:
                    own[name].copy_(whole)
        return model

    def log(self, row: Mapping[str, Any]) -> None:
        """Write a row to metrics.jsonl and hand it to the hooks; on the main process only."""
        if "tokens_per_second" in row:
            self.speeds.append(row["tokens_per_second"])
        if self.metrics is not None:
            self.hooks.call("logged", self, self.metrics.append(row))

    def event(self, name: str, /, **details: Any) -> None:
        """Log an event at this step, {"step", "event", "elapsed_seconds", ...}; on the main process only."""
        of_all = {"step": self.state.step, "event": name, "elapsed_seconds": self.state.elapsed_seconds}
        self.log(of_all | details)

    def restart_hooks(self) -> None:
        """Drop the rows after this step, which will be written again, and start the hooks from the rest.

        The row of this step goes, too, if its evaluation is yet to be finished.
        """
        if self.metrics is not None:
            self.earlier = self.metrics.rewind(self.state.step - (self.state.unfinished_row is not None))
        self.speeds = [speed for row in self.earlier.rows if (speed := row.get("tokens_per_second")) is not None]
        for event in self.earlier.events:
            if event["event"] == "init_from":
                self.evaluation_at_start = {key: value for key, value in event.items() if "val_" in key}
        self.hooks.load_state_dict(self.state.hooks)
        self.hooks.call("start", self)
        self.earlier = Metrics([], [])

    def stop(self) -> None:
        """End the run after this step, as if it were the last: with an evaluation, a checkpoint and the model."""
        self.clock.end()
