"""Saving the whole state of a run while it goes on, and loading it to the last bit.

Owns what is in a checkpoint: the files of accelerate's save_state and, unless the weights are sharded, what
`from_pretrained` needs beside them. A thread writes them while the run computes the next gradients; the next update
waits until they are written, but not until they are hashed and on the disk. A GPU's tensors are copied to the host
first, so that no update waits. Does not know when to save, nor which checkpoint is the right one (checkpoint.py).
"""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import clean_state_dict_for_safetensors, gather_object, load
from accelerate.utils.constants import OPTIMIZER_NAME, RNG_STATE_NAME, SCALER_NAME
from accelerate.utils.constants import SAFE_WEIGHTS_NAME as WEIGHTS_NAME
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor

from hfgolf.checkpoint.identity import RUN_NAME, has_other_data, read_identity
from hfgolf.checkpoint.state import TrainState
from hfgolf.checkpoint.store import (
    STATE_NAME,
    begin_checkpoint,
    choose_checkpoint,
    commit_checkpoint,
    make_latest,
    point,
    read_manifest,
    retain,
    step_folder,
)
from hfgolf.command_line import one_line
from hfgolf.errors import UserError
from hfgolf.hardware import free_memory_bytes
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.ema import Ema

logger = logging.getLogger(__name__)

EMA_NAME = "ema.safetensors"
_REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Checkpointer:
    """Saves and loads one run's model, optimizer, scaler, averages, TrainState and random generators."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        model: GolfForCausalLM,
        optimizer: Any,
        state: TrainState,
        ema: Ema | None,
        keep_last: int,
        identity: dict[str, Any],
        files_beside_weights: dict[str, bytes],
    ) -> None:
        self._accelerator = accelerator
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._ema = ema
        self._keep_last = keep_last
        self.identity = identity
        """What makes the run this run (run_identity), for `run.json`."""
        self._files_beside_weights = files_beside_weights
        self._is_replicated = accelerator.distributed_type in _REPLICATED
        self._copies: dict[tuple[str, ...], Tensor] = {}
        self._is_read = Event()
        self._is_read.set()
        optimizer.optimizer.register_step_pre_hook(self._wait_until_read)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[Any] | None = None
        self._failures: list[str] = []
        if self._is_replicated:  # the weights go into the model itself: a wrapper's keys depend on the processes
            accelerator.register_load_state_pre_hook(self._load_weights)

    def save(self, is_best: bool, before_commit: Callable[[], None] = lambda: None) -> None:
        """Begin to write `step-NNNNNN` in the background; all ranks call it together.

        before_commit: called there by the main process, once the files are written and before the checkpoint appears.

        A save that fails (a full disk) leaves the earlier checkpoints alone and shows up in `failures`. Weights that
        are not finite are not saved, and show up there too.
        """
        self.wait()
        step = self._state.step
        nonfinite = first_nonfinite(self._model.named_parameters())
        if nonfinite is not None:
            self._failures.append(
                f"checkpoint of step {step} not written: {nonfinite} holds values that are not finite"
            )
            return
        write = self._contents() if self._is_replicated else self._save_sharded()
        if self._accelerator.is_main_process:
            self._write = self._thread.submit(self._commit, step, write, is_best, before_commit)

    def reserve(self) -> None:
        """Take the host's memory for the copies of a GPU's tensors, in the background: to pin it takes time."""
        if self._is_replicated and self._accelerator.is_main_process and self._accelerator.device.type == "cuda":
            self._write = self._thread.submit(self._copy_all, self._tensors())

    def wait(self) -> None:
        """Wait until the last save is on the disk, or has failed; on ranks other than the main one, do nothing."""
        if self._write is not None:
            self._write.result()
            self._write = None

    def failures(self) -> list[str]:
        """Return, once, a line for each save that failed."""
        failures, self._failures = self._failures, []
        return failures

    def choose(self, which: str) -> Path | None:
        """Return the checkpoint that `which` (as train.resume) means: see choose_checkpoint."""
        return choose_checkpoint(self._accelerator.state, self._folder, which)

    def load(self, checkpoint: Path) -> None:
        """Restore everything as it was saved, on this rank; the model and the optimizer stay the same objects.

        Newer checkpoints are set aside: what follows replaces them. Data of another text or order begins anew.
        Raises UserError where a file holds something else, or more than data: nothing in it is ever executed.
        """
        self.wait()
        accelerator = self._accelerator
        own = checkpoint / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl"
        rates = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        try:
            accelerator.load_state(str(checkpoint), map_location="cpu")
            states = load(own) if own.exists() else None
            if states is not None:
                self._check_random_states(states, own)
            self._state.load_state_dict(json.loads((checkpoint / STATE_NAME).read_text()))
            if has_other_data(read_identity(checkpoint), self.identity):
                self._state.begin_data()
            if self._ema is not None:
                _load_ema(self._ema, checkpoint / EMA_NAME)
        except pickle.UnpicklingError:
            raise UserError(f"train.resume: {checkpoint} holds more than data: a pickle that would run code.") from None
        except UserError:
            raise
        except Exception as error:  # whatever torch, accelerate and safetensors make of something else
            reason = one_line(error)[:300]
            raise UserError(f"train.resume: {checkpoint} does not fit this run ({reason}); choose another.") from None
        for group, of_config in zip(self._optimizer.param_groups, rates, strict=True):
            group.update(of_config)  # the config says the rates, not the checkpoint
        best = step_folder(checkpoint.parent, self._state.best_step)
        if checkpoint.resolve().parent != self._folder.resolve() or not best.exists():  # of another run, or abandoned
            self._state.best_val_loss, self._state.best_step = float("inf"), 0
        if accelerator.is_main_process:
            make_latest(self._folder, checkpoint)
        accelerator.step = 0  # counts micro-batches, and a step may have another number of them now
        if states is None and accelerator.num_processes == read_manifest(checkpoint)["processes"]:
            raise UserError(f"train.resume: {own} is missing; choose an earlier checkpoint.")
        if states is None:  # a rank that was not there before: its dropout must differ from the others'
            torch.manual_seed(hash((self._state.step, accelerator.process_index)))

    def _load_weights(self, models: list[Any], folder: str) -> None:
        load_model(self._model, Path(folder) / WEIGHTS_NAME, device="cpu")
        models.clear()  # accelerate loads what is left in the list

    def _check_random_states(self, states: dict[str, Any], file: Path) -> None:
        """Raise UserError where accelerate has not restored the generators: it passes over errors in silence."""
        device = self._accelerator.device
        is_restored = torch.equal(states["torch_manual_seed"], torch.get_rng_state())
        if device.type == "cuda":
            for of_device in states.get("torch_cuda_manual_seed", [])[device.index or 0 :][:1]:  # none: saved elsewhere
                is_restored = is_restored and torch.equal(of_device, torch.cuda.get_rng_state(device))
        if not is_restored:
            raise UserError(f"train.resume: the random state in {file} could not be restored; choose another.")

    def _tensors(self) -> dict[str, Any]:
        """Return what is to be saved and lies on the device, by file name."""
        contents = {
            WEIGHTS_NAME: clean_state_dict_for_safetensors(self._model.state_dict()),
            f"{OPTIMIZER_NAME}.bin": self._optimizer.state_dict(),
        }
        if self._ema is not None:
            contents[EMA_NAME] = self._ema.state_dict()
        return contents

    def _contents(self) -> Callable[[Path], None]:
        """Return what writes all there is to save; every rank takes part, with its random generators."""
        accelerator = self._accelerator
        random_states = gather_object([_random_states(accelerator.step)])
        notes = self._notes()
        contents = self._tensors() if accelerator.is_main_process else {}
        copies = self._copy_all(contents) if accelerator.device.type == "cuda" else None
        if copies is not None:
            contents = copies
            torch.cuda.synchronize()  # they are under way
        elif accelerator.is_main_process:
            self._is_read.clear()  # what is written are the tensors that the next update changes
        if accelerator.scaler is not None:
            contents[SCALER_NAME] = accelerator.scaler.state_dict()
        contents |= {f"{RNG_STATE_NAME}_{rank}.pkl": states for rank, states in enumerate(random_states)}
        contents |= self._files_beside_weights

        def write(folder: Path) -> None:
            for name, content in contents.items():
                if isinstance(content, bytes):
                    (folder / name).write_bytes(content)
                elif name.endswith(".safetensors"):
                    save_file(content, folder / name, metadata={"format": "pt"})
                else:
                    with (folder / name).open("wb") as file:  # by name, torch would not say what the disk said
                        torch.save(content, file)
            _write_notes(notes, folder)

        return write

    def _notes(self) -> dict[str, str]:
        """Return what is saved as JSON, by file name."""
        contents = {STATE_NAME: self._state.state_dict(), RUN_NAME: self.identity}
        return {name: json.dumps(content, indent=1) for name, content in contents.items()}

    def _wait_until_read(self, *of_step: Any) -> None:
        """Wait until no save needs the tensors any more; the optimizer calls it before each update."""
        self._is_read.wait()

    def _save_sharded(self) -> Callable[[Path], None]:
        """Have accelerate save what is spread over the ranks: no rank could copy all of it."""
        accelerator, notes = self._accelerator, self._notes()
        shards = self._folder / f".partial-shards-{self._state.step}"
        accelerator.save_state(str(shards))
        accelerator.wait_for_everyone()  # save_state has no barrier of its own at the end

        def write(folder: Path) -> None:
            for path in shards.iterdir():
                path.rename(folder / path.name)
            shards.rmdir()
            _write_notes(notes, folder)

        return write

    def _copy_all(self, contents: dict[str, Any]) -> dict[str, Any] | None:
        """Copy a GPU's tensors into memory that is kept for the next save; None where there is no room for it."""
        num_bytes = sum(leaf.nbytes for _, leaf in leaves(contents) if isinstance(leaf, Tensor))
        if not self._copies and free_memory_bytes(torch.device("cpu")) < 2 * num_bytes:
            return None
        try:
            return self._copy(contents)
        except RuntimeError:  # what torch raises where the host's memory can't be pinned
            self._copies.clear()
            return None

    def _copy(self, tree: Any, path: tuple[str, ...] = ()) -> Any:
        if isinstance(tree, dict):
            return {key: self._copy(value, (*path, str(key))) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self._copy(value, (*path, str(i))) for i, value in enumerate(tree))
        if not isinstance(tree, Tensor):
            return tree
        copy = self._copies.get(path)
        if copy is None or copy.shape != tree.shape or copy.dtype != tree.dtype:
            copy = self._copies[path] = torch.empty(tree.shape, dtype=tree.dtype, pin_memory=True)
        return copy.copy_(tree, non_blocking=True)

    def _commit(
        self, step: int, write: Callable[[Path], None], is_best: bool, before_commit: Callable[[], None]
    ) -> None:
        partial = None
        try:
            partial = begin_checkpoint(self._folder, step)
            write(partial)
            self._is_read.set()
            before_commit()
            checkpoint = commit_checkpoint(partial, step, self._accelerator.num_processes)
            if is_best:
                point(self._folder / "best", checkpoint)
            retain(self._folder, self._keep_last)
        except Exception as error:  # OSError, or what torch and safetensors make of it
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            reason = error.__context__ if isinstance(error.__context__, OSError) else error  # torch hides the disk's
            self._failures.append(f"checkpoint of step {step} not written: {one_line(reason)[:200]}")
        finally:
            self._is_read.set()


def _write_notes(notes: dict[str, str], folder: Path) -> None:
    for name, content in notes.items():
        (folder / name).write_text(content, encoding="utf-8")


def _load_ema(ema: Ema, file: Path) -> None:
    if file.exists():
        ema.load_state_dict(load_file(file))
    else:
        logger.info("the checkpoint has no averaged weights: they start from its weights")
        ema.restart()


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of nested dicts, lists and tuples, by their path in it."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree


@torch.no_grad()
def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds an infinity or a NaN."""
    names, tensors = zip(*named, strict=True)
    norms = torch._foreach_norm(tensors)  # one pass and one look at the device, a tenth of isfinite's time on a CPU
    if torch.stack(norms).isfinite().all():
        return None
    # a norm may overflow where no value does
    return next((name for name, x in zip(names, tensors, strict=True) if not x.isfinite().all()), None)


def _random_states(step: int) -> dict[str, Any]:
    """Return what accelerate saves as random_states_N.pkl, in memory."""
    states = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return states
