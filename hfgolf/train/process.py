"""Set up this process: its rank and device, its session, memory allocator and seeds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from hfgolf.system.errors import UserError
from hfgolf.system.hardware import cpu_cores
from hfgolf.system.ranks import together
from hfgolf.system.rendezvous import find_launch, meet
from hfgolf.system.signals import BEFORE_THE_FIRST_STEP, Signals
from hfgolf.system.stopwatch import Stopwatch, process_seconds
from hfgolf.train.console import console
from hfgolf.train.launched import check_settings, launch_arguments

if TYPE_CHECKING:
    from accelerate import PartialState

    from hfgolf.config.sections import RunConfig

# NCCL's 10 minutes are too short for what only rank 0 does while the others wait, such as forecasting an export
_PATIENCE = timedelta(hours=2)
_ELSEWHERE = "192.0.2.1"  # for documentation (RFC 5737): no machine has it, so the way there is the default route
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _DEFAULT_MMAP_MAX = -1, -3, -4, 65_536  # from malloc.h and glibc
# Large pages make a step of 25 M parameters 1.04 to 1.10 times as fast, and one of 49 M 0.90 to 0.94 times.
LARGE_PAGES_PARAMETERS = 30_000_000
LARGE_BLOCK_BYTES = 2**22


@contextlib.contextmanager
def session(config: RunConfig, signals: Signals | None) -> Iterator[tuple[Signals, Stopwatch]]:
    """Handle signals, meet the other processes and open the console inside a `with` block.

    signals: already entered by the caller; None: the caller is Python, which has done other things before. Yields the
    signals and the stopwatch of the run. Of what the caller did, only that before its first run belongs to it.
    Afterwards, the next run may choose another precision and other kernels. Raises UserError if the processes do not
    share the run's folder.
    """
    from accelerate.state import AcceleratorState

    from hfgolf.run.folder import run_folder
    from hfgolf.train.claim import require_shared

    not_ours = 0.0 if signals is not None and not signals.runs else process_seconds()
    is_own = not AcceleratorState._shared_state
    with contextlib.ExitStack() as stack:
        if is_own:
            stack.callback(AcceleratorState._reset_state)
        if config.train.deterministic:
            only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
            before = torch.are_deterministic_algorithms_enabled()
            stack.callback(torch.use_deterministic_algorithms, before, warn_only=only_warns)
        stack.callback(run_folder(config).unlock)
        signals = stack.enter_context(signals or Signals())
        signals.runs, signals.stop_message = signals.runs + 1, BEFORE_THE_FIRST_STEP
        stack.enter_context(console)
        stack.enter_context(together(processes().num_processes))
        if processes().is_main_process:
            console.open()
        require_shared(run_folder(config))
        stopwatch = Stopwatch(console.switch)
        stopwatch.carry_over({"setup": -not_ours})
        yield signals, stopwatch


def processes() -> PartialState:
    """Return this process's rank, the number of processes and the device, before there is an Accelerator.

    The first call waits for the other processes. Raises UserError if the launcher's variables do not fit together, if
    accelerate does not see the processes that it started (each would train alone), or if it was told to shard the model
    in a way that does not work here.
    """
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    names = ("gradient_accumulation_steps", "gradient_clipping")  # accelerate tells only DeepSpeed of these
    arguments = launch_arguments()
    stated = {f"ACCELERATE_{name.upper()}": getattr(arguments, name, None) for name in names}
    check_settings(os.environ | {name: str(value) for name, value in stated.items() if value is not None})
    use_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    options: dict[str, Any] = {"timeout": _PATIENCE}
    launch = find_launch()
    if launch and not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # without it, accelerate ignores what torchrun says on a CPU
        use_cpu = True
    if launch and "GLOO_SOCKET_IFNAME" not in os.environ and (interface := gloo_interface()):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if launch and not PartialState._shared_state and not torch.distributed.is_mpi_available():
        options |= {"store": meet(launch, _PATIENCE), "rank": launch.rank, "world_size": launch.size}
    # the first PartialState of a process decides for all later ones; `cpu` is as in Accelerator's own call
    state = PartialState(cpu=use_cpu, **options)
    if launch and state.num_processes != launch.size:
        raise UserError(
            f"WORLD_SIZE: {launch.size} processes were started, but accelerate can use only {state.num_processes} on"
            f" {state.device.type}; start one process, or set ACCELERATE_USE_CPU=true to train on the CPU."
        )
    return state


def gloo_interface() -> str | None:
    """Return the network interface for gloo to listen on, None to leave the choice to gloo.

    Gloo takes the address that the host's own name resolves to. That is 127.0.1.1 on many machines, where no other
    machine finds it. NCCL chooses by itself, so without this a run on GPUs would fail only in its first gloo group.
    """
    interface_of = {
        address.address.partition("%")[0]: name  # fe80::1%eth0
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    stated = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if stated in interface_of.values():  # it may also be a prefix, a list, or what to leave out
        return stated
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return interface_of.get("127.0.0.1")
    main = os.environ.get("MASTER_ADDR", "localhost")
    own = _own_address_towards(main)
    if own and own.startswith("127.") and not main.startswith(("127.", "localhost")):
        own = _own_address_towards(_ELSEWHERE)  # the main machine itself, which knows its own name as 127.0.1.1
    return interface_of.get(own) if own else None


def _own_address_towards(host: str) -> str | None:
    """Return this machine's address on the way to a host, None if there is no way. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as udp:
            udp.connect(address)
            return str(udp.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def local_processes() -> int:
    """Return the number of processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share_of_cores(num_processes: int) -> int:
    """Return the CPU threads of each of the processes on this machine.

    On a machine without a GPU, `accelerate launch` sets OMP_NUM_THREADS=1, which would leave the other cores idle.
    """
    return max(1, cpu_cores() // num_processes)


def tune_memory(config: RunConfig) -> None:
    """Tell torch and the C library what to do with large tensors on a CPU. Call before the first tensor.

    By default, glibc returns large blocks at once, and the kernel must map and clear the same memory again in the next
    step. hfgolf keeps them instead, and puts the tensors of a small model in 2 MB pages: fewer TLB lookups, a little
    more memory. Of a large model these cost time, too. With train.low_memory, large blocks are returned at once.
    torch reads THP_MEM_ALLOC_ENABLE, and a value set by the user wins. With another C library than glibc, nothing else
    is done. benchmarks/kept_memory.py measures it.
    """
    in_blocks = 12 * config.model.num_hidden_layers * config.model.hidden_size**2  # nearly, whatever the architecture
    is_low = config.train.low_memory
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1" if in_blocks <= LARGE_PAGES_PARAMETERS and not is_low else "0")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX if is_low else 0)
        if is_low:
            mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, -1)


def trim_memory() -> None:
    """Give back to the system what set-up has freed, which `tune_memory` keeps: the tensors of a step rarely fit there.

    With another C library than glibc, this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy, torch and CUDA. Call before building anything, so that all ranks build equal weights.

    deterministic: use deterministic kernels, and raise if an operation has none (torch.use_deterministic_algorithms;
    cuBLAS also needs its workspace setting).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds CUDA too
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
