"""Write and read a checkpoint's tensors while they are sharded over processes (FSDP2): none ever holds them all.

Owns the two forms that such tensors have on disk:

    optimizer/       each process writes its own shards of the optimizer's state, by torch.distributed.checkpoint; any
                     number of processes can read them, each only what it needs
    *.safetensors    weights, as one file with whole tensors, which `from_pretrained` reads; the main process writes one
                     tensor after the other, as they are gathered

Does not know what else a checkpoint holds (contents.py) or when it is complete (store.py).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfgolf.optim.muon import Muon
from hfgolf.optim.shards import full_tensor
from hfgolf.optim.state import matched_state
from hfgolf.system.durable import write_text

OPTIMIZER_FOLDER = "optimizer"
_GROUPS_NAME = "groups.json"
# in the order of safetensors' own writer: it begins with the last
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}


def save_optimizer(optimizer: Muon, folder: Path, is_main: bool) -> None:
    """Write this rank's shards of the optimizer's state, without syncing them. All ranks call it.

    Raises OSError if a rank could not write its shards; then all ranks do. The main rank alone writes the groups.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    # in safetensors: to read torch's own form, a pickle must be loaded, which could run code
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        checkpoint.save(_named_state(optimizer), storage_writer=writer)
    except CheckpointException as failed:  # a BaseException
        raise OSError(str(next(iter(failed.failures.values()))[0])) from None
    if is_main:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        write_text(folder / _GROUPS_NAME, json.dumps(groups, indent=1))


def load_optimizer(optimizer: Muon, folder: Path) -> None:
    """Load what `save_optimizer` wrote into an optimizer that may be sharded. Each rank reads what it needs.

    Raises UserError, before anything changes, if names, rules or shapes differ.
    """
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    groups = [group | {"params": group["param_names"]} for group in json.loads((folder / _GROUPS_NAME).read_text())]
    outline: dict[str, dict[str, Tensor]] = {}
    for name, tensor in reader.read_metadata().state_dict_metadata.items():
        param, _, kind = name.rpartition(".")
        outline.setdefault(param, {})[kind] = torch.empty(tensor.size, device="meta")  # type: ignore[union-attr]
    matched_state(optimizer.param_groups, {"param_groups": groups, "state": outline})
    optimizer.create_state()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # without collectives: a rank that fails here leaves none waiting
        checkpoint.load(_named_state(optimizer), storage_reader=reader, no_dist=True)


def write_weights(file: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, each gathered, written and dropped before the next. All ranks call it.

    file: None on the ranks that only contribute their shards. A tensor with several names, like a tied weight, is
    written under the first. Raises OSError, but only after this rank has done its part in gathering.
    """
    unique = {id(tensor): (name, tensor) for name, tensor in reversed(list(tensors.items()))}
    parts = safetensors_parts(dict(unique.values()))
    try:
        if file is not None:
            with file.open("wb") as opened:
                for part in parts:
                    opened.write(part)
    finally:
        for _ in parts:  # the others would wait for this rank
            pass


def safetensors_parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: the header's length, the header, and each tensor, if sharded gathered.

    Order and header are those of safetensors' own writer, so that the file has the same bytes.
    """
    ranks = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
    named = sorted(tensors.items(), key=lambda item: (-ranks[item[1].dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in named:
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for _, tensor in named:
        whole = full_tensor(tensor.detach()).cpu().contiguous()
        yield whole.reshape(-1).view(torch.uint8).numpy().data


def _named_state(optimizer: Muon) -> dict[str, Tensor]:
    """Return the optimizer's own tensors by the name of their parameter and their kind."""
    return {
        f"{name}.{kind}": value
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
        for kind, value in optimizer.state[param].items()
    }
