"""Save the complete state of a run while it continues, and restore it bit for bit.

Owns what is in a checkpoint:

    model.safetensors          the weights, fp32; tied weights once
    optimizer.bin              the state of the optimizer (a pickle that is read as data only)
    optimizer/                 FSDP2 only, instead: each process's shards of that state (sharded.py)
    scaler.pt                  fp16 only: the loss scale
    ema.safetensors            optim.ema_* only: the averaged weights
    random_states_N.pkl        the generators of rank N, so that dropout continues bit for bit
    train_state.json           TrainState: steps, tokens, blocks read, the best loss
    run.json                   what makes the run this run: config, text, tokenizer, decisions (identity.py)
    config.json, *_golf.py, generation_config.json, tokenizer*
                               the other files that `from_pretrained` needs
    manifest.json              sizes and sha256 of all of these (store.py)

Threads write and hash them while the run computes the next gradients. The next update waits until they are written, but
not until they are synced to disk. A GPU's tensors are first copied to the host, so that no update waits. FSDP2's
are written before the run continues, and no process holds them all; any number and kind of processes can read them.
Does not know when to save (train/loop.py) or which checkpoint to load (store.py).
"""

from __future__ import annotations

import functools
import json
import logging
import pickle
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from accelerate.checkpointing import load_accelerator_state
from accelerate.utils import clean_state_dict_for_safetensors, gather_object, load
from accelerate.utils.constants import OPTIMIZER_NAME, RNG_STATE_NAME, SCALER_NAME
from accelerate.utils.constants import SAFE_WEIGHTS_NAME as WEIGHTS_NAME
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.utils._pytree import tree_map_with_path
from torch.utils.serialization import config
from transformers import PreTrainedModel

from hfgolf.checkpoint.identity import RUN_NAME, has_other_data, judges_otherwise, read_identity
from hfgolf.checkpoint.sharded import (
    OPTIMIZER_FOLDER,
    load_optimizer,
    safetensors_parts,
    save_optimizer,
    write_weights,
)
from hfgolf.checkpoint.state import TrainState
from hfgolf.checkpoint.store import (
    STATE_NAME,
    begin_checkpoint,
    commit_checkpoint,
    hidden_folder,
    make_latest,
    prune,
    read_manifest,
    replace_link,
    step_folder,
)
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.ema import Ema
from hfgolf.optim.shards import copy_full, is_sharded, local_shards, on_any_rank
from hfgolf.system.durable import HashedFile, sync, sync_tree
from hfgolf.system.errors import UserError
from hfgolf.system.hardware import free_memory_bytes
from hfgolf.system.wording import one_line

logger = logging.getLogger(__name__)

EMA_NAME = "ema.safetensors"


@dataclass(eq=False)
class Checkpointer:
    """Saves and loads one run's model, optimizer, scaler, averages, TrainState and random generators."""

    accelerator: Accelerator
    folder: Path
    model: PreTrainedModel
    """Unwrapped."""
    optimizer: Any
    state: TrainState
    ema: Ema | None
    keep_last: int
    identity: dict[str, Any]
    """The identity of the run (see run_identity), saved as `run.json`."""
    supporting_files: dict[str, bytes]
    """{name: content} of the other files that `from_pretrained` needs."""

    def __post_init__(self) -> None:
        self._is_sharded = self.accelerator.distributed_type == DistributedType.FSDP
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        """Pinned host copies of a GPU's tensors, reused by each save."""
        self._tensors_released = Event()
        """Set unless a save still reads the tensors that the next update changes."""
        self._tensors_released.set()
        self.optimizer.optimizer.register_step_pre_hook(self._wait_for_release)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[Any] | None = None
        self._failures: list[str] = []

    def save(self, is_best: bool, before_commit: Callable[[], None] = lambda: None) -> None:
        """Start writing `step-NNNNNN` in the background. All ranks call it together.

        before_commit: called in the background on the main process, after the files are written and before the
        checkpoint appears.

        If a save fails (a full disk, for example) or the weights are not finite, no checkpoint appears, the earlier
        ones are untouched, and `failures` reports it.
        """
        self.wait()
        step = self.state.step
        nonfinite = first_of_ranks(first_nonfinite(self.model.named_parameters()))
        if nonfinite is not None:
            self._failures.append(f"checkpoint of step {step} not written: {nonfinite} holds nonfinite values")
            return
        if self._is_sharded and not self._write_shards(step):
            return
        write = self._prepare_write()
        if self.accelerator.is_main_process:
            self._write = self._thread.submit(self._commit, step, write, is_best, before_commit)

    def reserve(self) -> None:
        """Allocate the host memory for copies of a GPU's tensors, in the background because pinning it is slow."""
        accelerator = self.accelerator
        if accelerator.is_main_process and accelerator.device.type == "cuda" and not self._is_sharded:
            self._write = self._thread.submit(self._copy_to_host, self._tensors())

    def wait(self) -> None:
        """Wait until the last save is on disk or has failed. On ranks other than the main one, do nothing."""
        if self._write is not None:
            self._write.result()
            self._write = None

    def failures(self) -> list[str]:
        """Return one line for each save that failed since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def load(self, checkpoint: Path) -> None:
        """Restore everything as it was saved, on this rank; the model and the optimizer remain the same objects.

        Sets newer checkpoints aside, because the run replaces them. If the text or its order has changed, starts at the
        beginning of the data. Raises UserError if a file does not fit this run, or is a pickle that would run code;
        nothing in a checkpoint is ever executed.
        """
        self.wait()
        accelerator = self.accelerator
        own = checkpoint / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl"
        is_new_rank = not own.exists()
        if is_new_rank and accelerator.num_processes == read_manifest(checkpoint)["processes"]:
            raise UserError(f"train.resume: {own} is missing; choose an earlier checkpoint.")
        rates = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            self._load_accelerator_state(checkpoint)
            if not is_new_rank:
                _check_random_states(load(own), own, accelerator.device)
            self.state.load_state_dict(json.loads((checkpoint / STATE_NAME).read_text()))
            if isinstance(self.model, GolfForCausalLM):
                self.model.config.loop_active = self.state.loop_active
            before = read_identity(checkpoint)
            if has_other_data(before, self.identity):
                self.state.begin_data()
            elif judges_otherwise(before, self.identity):
                self.state.forget_best()
            if self.ema is not None:
                _load_ema(self.ema, checkpoint / EMA_NAME)
        except pickle.UnpicklingError:
            raise UserError(
                f"train.resume: {checkpoint} holds a pickle that would run code, so it was not loaded; choose another."
            ) from None
        except UserError:
            raise
        except Exception as error:  # torch, accelerate and safetensors raise many kinds for a wrong file
            reason = one_line(error)[:300]
            raise UserError(f"train.resume: {checkpoint} does not fit this run ({reason}); choose another.") from None
        for group, settings in zip(self.optimizer.param_groups, rates, strict=True):
            group.update(settings)  # the learning rates come from the config, not from the checkpoint
        best = step_folder(checkpoint.parent, self.state.best_step)
        if checkpoint.resolve().parent != self.folder.resolve() or not best.exists():  # another run's, or set aside
            self.state.best_val_loss, self.state.best_step = float("inf"), 0
        if accelerator.is_main_process:
            make_latest(self.folder, checkpoint)
        accelerator.step = 0  # accelerate counts micro-batches, and a step may now have a different number of them
        if is_new_rank:  # its dropout must differ from that of the others
            torch.manual_seed(hash((self.state.step, accelerator.process_index)))

    def _load_accelerator_state(self, checkpoint: Path) -> None:
        """Load weights, optimizer, scaler and random generators; of files with whole tensors, a rank takes its shards.

        Weights go into the unwrapped model, because a wrapper's keys depend on the number of processes.
        """
        accelerator, sharded, weights = self.accelerator, checkpoint / OPTIMIZER_FOLDER, checkpoint / WEIGHTS_NAME
        if self._is_sharded:
            load_weights(self.model, load_file(weights))  # maps the file: pages are read as needed
        else:
            load_model(self.model, weights, device="cpu")
        optimizers = [] if sharded.is_dir() else [self.optimizer]
        settings = (accelerator.process_index, accelerator.scaler, "cpu")
        load_accelerator_state(str(checkpoint), [], optimizers, [], [], *settings)
        if sharded.is_dir():
            load_optimizer(self.optimizer.optimizer, sharded)

    def _write_shards(self, step: int) -> bool:
        """Write what is sharded into the hidden folder of a checkpoint; return whether all ranks could.

        All ranks call it. Each part ends on all of them before the next begins, because a rank that has failed must not
        leave the others alone in a collective.
        """
        partial, is_main = hidden_folder(self.folder, step), self.accelerator.is_main_process
        parts: list[Callable[[], Any]] = [
            lambda: begin_checkpoint(self.folder, step) if is_main else None,
            lambda: save_optimizer(self.optimizer.optimizer, partial / OPTIMIZER_FOLDER, is_main),
            # On every machine, because the writer's own fsync misses what Python still buffers. A part of its own,
            # because the main process renames a file in the part before.
            lambda: sync_tree(partial / OPTIMIZER_FOLDER),
        ]
        tensors = {WEIGHTS_NAME: self.model.state_dict(keep_vars=True)}  # keep_vars: tied weights are one object
        if self.ema is not None:
            tensors[EMA_NAME] = self.ema.state_dict()
        for name, named in tensors.items():
            parts.append(functools.partial(write_weights, partial / name if is_main else None, named))
        for write in parts:
            failure = first_of_ranks(_failure_of(write))
            if failure is not None:
                if is_main:
                    self._note_failure(step, partial, failure)
                return False
        return True

    def _tensors(self) -> dict[str, Any]:
        """Return the state on the device to save, by file name."""
        contents: dict[str, Any] = {WEIGHTS_NAME: clean_state_dict_for_safetensors(self.model.state_dict())}
        contents[f"{OPTIMIZER_NAME}.bin"] = self.optimizer.state_dict()
        if self.ema is not None:
            contents[EMA_NAME] = self.ema.state_dict()
        return contents

    def _prepare_write(self) -> Callable[[Path], dict[str, Any]]:
        """Collect the state; return a function that writes it and lists the files with their hashes.

        Every rank contributes its random states.
        """
        accelerator = self.accelerator
        random_states = gather_object([_random_states(accelerator.step)])
        json_files = self._json_files()  # now: the state changes with the next step
        contents: dict[str, Any] = {}
        if accelerator.is_main_process and not self._is_sharded:
            contents = self._tensors()
            copies = self._copy_to_host(contents) if accelerator.device.type == "cuda" else None
            if copies is not None:
                contents = copies
                torch.cuda.synchronize()  # the copies are asynchronous
            else:
                self._tensors_released.clear()  # the thread writes the very tensors that the next update changes
        if accelerator.scaler is not None:
            contents[SCALER_NAME] = accelerator.scaler.state_dict()
        contents |= {f"{RNG_STATE_NAME}_{rank}.pkl": states for rank, states in enumerate(random_states)}
        contents |= self.supporting_files | json_files

        def write(folder: Path) -> dict[str, Any]:
            with ThreadPoolExecutor(thread_name_prefix="checkpoint") as threads:
                written = {name: threads.submit(write_file, folder / name, what) for name, what in contents.items()}
                synced = {name: threads.submit(_sync, file, folder / name) for name, file in written.items()}
                wait(written.values())
                self._tensors_released.set()
            return {name: entry.result() for name, entry in synced.items()}

        return write

    def _json_files(self) -> dict[str, bytes]:
        """Return the content of the checkpoint's JSON files, by file name."""
        contents = {STATE_NAME: self.state.state_dict(), RUN_NAME: self.identity}
        is_looped = isinstance(self.model, GolfForCausalLM) and self.model.config.loop
        if is_looped and "config.json" in self.supporting_files:  # the model as it is trained now
            config = json.loads(self.supporting_files["config.json"])
            contents["config.json"] = config | {"loop_active": self.state.loop_active}
        return {name: json.dumps(content, indent=1).encode() for name, content in contents.items()}

    def _wait_for_release(self, *hook_arguments: Any) -> None:
        """Wait until no save reads the tensors any more; the optimizer calls this before each update."""
        self._tensors_released.wait()

    def _copy_to_host(self, contents: dict[str, Any]) -> dict[str, Any] | None:
        """Copy a GPU's tensors into pinned host memory, kept for the next save; None if there is no room for it."""
        num_bytes = sum(leaf.nbytes for _, leaf in leaves(contents) if isinstance(leaf, Tensor))
        if not self._copies and free_memory_bytes(torch.device("cpu")) < 2 * num_bytes:
            return None
        try:
            return dict(tree_map_with_path(self._copy, contents))
        except RuntimeError:  # torch could not pin the memory
            self._copies.clear()
            return None

    def _copy(self, path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copy = self._copies.get(path)
        if copy is None or copy.shape != leaf.shape or copy.dtype != leaf.dtype:
            copy = self._copies[path] = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
        return copy.copy_(leaf, non_blocking=True)

    def _commit(
        self, step: int, write: Callable[[Path], dict[str, Any]], is_best: bool, before_commit: Callable[[], None]
    ) -> None:
        partial = hidden_folder(self.folder, step)
        try:
            if not self._is_sharded:
                begin_checkpoint(self.folder, step)
            listed = write(partial)
            before_commit()
            checkpoint = commit_checkpoint(partial, step, self.accelerator.num_processes, listed)
            if is_best:
                replace_link(self.folder / "best", checkpoint)
            prune(self.folder, self.keep_last)
        except Exception as error:  # OSError, or an error of torch or safetensors that hides it
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            self._note_failure(step, partial, one_line(reason))
        finally:
            self._tensors_released.set()

    def _note_failure(self, step: int, partial: Path, reason: str) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        self._failures.append(f"checkpoint of step {step} not written: {reason[:200]}")


def write_file(path: Path, content: Any) -> dict[str, Any]:
    """Write one file of a checkpoint: bytes, named tensors as safetensors, or a pickle. Return its size and sha256."""
    with HashedFile(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        elif path.suffix == ".safetensors":
            for part in safetensors_parts(content):
                file.write(part)
        else:
            # the manifest has a sha256: torch's own checksum takes as long, and nothing reads it
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # for this thread only
                torch.save(content, file)
    return file.entry()


def _sync(written: Future[dict[str, Any]], path: Path) -> dict[str, Any]:
    """Force a file to disk once it is written, while others are still written and hashed; return its entry."""
    entry = written.result()
    sync(path)
    return entry


def first_of_ranks(answer: str | None) -> str | None:
    """Return the answer of the lowest rank that has one. All ranks call it.

    By a collective: unlike the store of ranks.gather, it outlives a launcher that was killed, and then the run saves.
    """
    return next(filter(None, gather_object([answer])), None)


def _failure_of(write: Callable[[], Any]) -> str | None:
    """Call `write`; return the line of the OSError that it raises, or None."""
    try:
        write()
    except OSError as error:
        return one_line(error)
    return None


def _load_ema(ema: Ema, file: Path) -> None:
    if file.exists():
        ema.load_state_dict(load_file(file))
    else:
        logger.info("the checkpoint has no averaged weights; the average starts from its weights")
        ema.restart()


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights by name into a model that may be sharded; the others, such as tied ones, stay as they are."""
    own = model.state_dict(keep_vars=True)
    if not any(is_sharded(tensor) for tensor in own.values()):
        model.load_state_dict(weights, strict=False)
        return
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, but here it is {tuple(own[name].shape)}")
        copy_full(own[name], value)


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for each tensor and plain value in nested dicts, lists and tuples."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree


@torch.no_grad()
def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds an infinity or a NaN. If they are sharded, all ranks call it."""
    names, tensors = zip(*named, strict=True)
    shards = local_shards(tensors)
    norms = torch._foreach_norm(shards)  # one pass and one device sync; on a CPU ten times as fast as isfinite
    if not on_any_rank(~torch.stack(norms).isfinite().all(), tensors):
        return None
    # a norm may overflow even if every value is finite
    return next((n for n, x in zip(names, shards, strict=True) if on_any_rank(~x.isfinite().all(), tensors)), None)


def _random_states(step: int) -> dict[str, Any]:
    """Return what accelerate would save as random_states_N.pkl."""
    states = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return states


def _check_random_states(states: dict[str, Any], file: Path, device: torch.device) -> None:
    """Raise UserError if the generators were not restored: accelerate silently ignores such errors."""
    is_restored = torch.equal(states["torch_manual_seed"], torch.get_rng_state())
    if device.type == "cuda":
        # empty if the checkpoint was saved on a CPU
        for saved in states.get("torch_cuda_manual_seed", [])[device.index or 0 :][:1]:
            is_restored = is_restored and torch.equal(saved, torch.cuda.get_rng_state(device))
    if not is_restored:
        raise UserError(f"train.resume: the random state in {file} could not be restored; choose another.")
