"""Read any model that `pack` wrote: what unpack.py does, before script.py packs it.

Runs where only torch, numpy and the standard library are: it imports of hfgolf what is packed with it.

The header of such an artifact is LZMA of a list in JSON, a zero byte, and the bytes of the tensors that are stored
exactly. The list has, for each tensor once and in the order in which they are stored, its names in the state dict, its
dtype, its shape, and one of STORED, TRANSPOSED (inputs before outputs) and EXACT.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import sys

import numpy as np
import torch

from hfgolf.golf.decoder import read_sections, read_tensors, weights_of

STORED, TRANSPOSED, EXACT = range(3)


def unpack(path: str) -> dict[str, torch.Tensor]:
    """Return the state dict of a packed model, for load_state_dict: names that are tied share a tensor.

    Raises ValueError, one line, if the artifact is damaged.
    """
    with open(path, "rb") as file:
        data = file.read()
    listed, exact = lzma.decompress(read_sections(data)[0]).split(b"\0", 1)
    entries = json.loads(listed)
    shapes = [shape[::-1] if kind == TRANSPOSED else shape for _, _, shape, kind in entries if kind != EXACT]
    weights = iter(weights_of(read_tensors(data, shapes)))
    state, at = {}, 0
    for names, dtype_name, shape, kind in entries:
        dtype = getattr(torch, dtype_name)
        # A copy, because without elements, what from_numpy returns has no view of another type.
        if kind == EXACT:
            size = math.prod(shape) * dtype.itemsize
            values = torch.tensor(np.frombuffer(exact, np.uint8, size, at))
            tensor, at = values.view(dtype).reshape(shape), at + size
        else:
            weight = torch.from_numpy(np.asarray(next(weights)))
            tensor = torch.empty(shape, dtype=dtype).copy_(weight.T if kind == TRANSPOSED else weight)
        for name in names:
            state[name] = tensor
    return state


def state_sha256(state: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes and bytes of a state dict, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def print_sha256() -> None:
    try:
        print(state_sha256(unpack(sys.argv[1])))
    except Exception as error:  # a damaged artifact whose CRC is right raises anything
        sys.exit(f"error: {sys.argv[1]}: {error}")
