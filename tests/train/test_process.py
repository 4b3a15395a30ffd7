"""Precision, threads and memory, each with its source, also under `accelerate launch`."""

from __future__ import annotations

import functools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import VOCABULARY, tiny_model
from faults import FORKING

from hfgolf.config.parse import load_config
from hfgolf.config.sections import RunConfig
from hfgolf.evaluate.context import uncompiled
from hfgolf.model import causal_blocks
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.run.metrics import read_rows
from hfgolf.system import hardware
from hfgolf.system.errors import UserError
from hfgolf.system.stopwatch import Stopwatch
from hfgolf.train import compilation, decisions, launched, process, setup
from hfgolf.train.announce import announce_device
from hfgolf.train.compilation import compile_in_place, should_compile

CPU = torch.device("cpu")


def resolved(*arguments: str):
    return decisions.decide(load_config(["--train.max_steps=1", *arguments]), {})


@pytest.fixture
def launched_by(monkeypatch, tmp_path):
    """Pretend that `accelerate launch` started this process with these arguments and exported this precision."""

    def pretend(precision: str, *words: str) -> None:
        from accelerate.commands.config import config_args

        script = [] if "train.py" in words else ["train.py"]
        parent = SimpleNamespace(cmdline=lambda: ["accelerate", "launch", *words, *script])
        monkeypatch.setattr(process.psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
        monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none.yaml"))
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)

    return pretend


@pytest.mark.parametrize(
    ("launched", "options", "hardware", "outcome", "source"),
    [
        (("bf16",), (), "fp32", "bf16", "accelerate"),
        (("no", "--mixed_precision", "no"), (), "bf16", "no", "accelerate"),
        (("no", "--config_file", "x.yaml"), (), "bf16", "no", "accelerate"),
        (("no", "--mixed-precision=no"), (), "bf16", "no", "accelerate"),
        (("no",), (), "bf16", "bf16", "auto"),
        (("no", "--mixed_precision", "no"), ("--train.mixed_precision=bf16",), "bf16", "bf16", "command line"),
        ((), (), "bf16", "bf16", "auto"),
        ((), (), "fp32", "no", "auto"),
        ((), (), (7, 0), "fp16", "auto"),  # a GPU without bf16: a T4 has 8 TFLOP/s in fp32 and 65 in fp16
        ((), (), (6, 1), "no", "auto"),
        (("fp8",), (), "bf16", None, r"train.mixed_precision: fp8 \(from accelerate\) does not run on this device"),
    ],
    ids=str,
)
def test_precision_is_that_of_the_config_of_accelerate_or_of_the_hardware(
    launched_by, monkeypatch, launched, options, hardware, outcome, source
):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(
        decisions, "fast_product_dtype", lambda device: torch.bfloat16 if hardware == "bf16" else torch.float32
    )
    if isinstance(hardware, tuple):
        monkeypatch.setattr(decisions, "processes", lambda: SimpleNamespace(device=torch.device("cuda")))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: hardware)
    if launched:
        launched_by(*launched)
    if outcome is None:
        with pytest.raises(UserError, match=source):
            resolved(*options)
    else:
        answer = resolved(*options)
        assert (answer.config.train.mixed_precision, answer.sources["train.mixed_precision"]) == (outcome, source)


@pytest.mark.parametrize(("layers", "megabytes", "buckets"), [(12, 118, 4), (1, 44, 2)])
def test_ddp_has_few_buckets_because_each_is_a_compiled_graph(layers, megabytes, buckets):
    """GPT-2 124M has 13 by default. DDP begins with one of 1 MB."""
    with torch.device("meta"):
        model = GolfForCausalLM(
            GolfConfig(vocab_size=50257, hidden_size=768, num_attention_heads=12, num_hidden_layers=layers)
        )
    size = setup.bucket_megabytes(model)
    assert size == megabytes
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, size * 2**20]
    assignment, _ = dist._compute_bucket_assignment_by_size(list(model.parameters())[::-1], limits)
    assert len(assignment) == buckets
    accelerator = setup._build_accelerator(load_config(["--train.max_steps=1"]).config)
    assert accelerator.ddp_handler.gradient_as_bucket_view, "gradients are views of what DDP reduces"


@pytest.mark.parametrize(("precision", "lines"), [("bf16", 1), ("fp16", 0), ("no", 0)])
def test_emulated_bf16_and_idle_gpus_are_warned_of(monkeypatch, caplog, precision, lines):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 + lines)
    gpu = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    said = load_config(["--train.max_steps=1", f"--train.mixed_precision={precision}"])
    announce_device(decisions.Decisions(said.config, said.sources, precision), gpu)
    assert len([line for line in caplog.messages if "only emulates bf16" in line]) == lines
    assert len([line for line in caplog.messages if "one of 2 GPUs trains" in line]) == lines


@pytest.mark.parametrize(
    ("source", "fastest", "lines"),
    [("accelerate", torch.bfloat16, 1), ("accelerate", torch.float32, 0), ("command line", torch.bfloat16, 0)],
)
def test_fp32_by_accelerate_s_defaults_is_warned_of_where_bf16_is_fast(monkeypatch, caplog, source, fastest, lines):
    monkeypatch.setattr("hfgolf.train.announce.fast_product_dtype", lambda device: fastest)
    said = load_config(["--train.max_steps=1"]).resolve(source, train__mixed_precision="no")
    announce_device(decisions.Decisions(said.config, said.sources, "no"), SimpleNamespace(device=CPU, num_processes=1))
    assert len([line for line in caplog.messages if "--train.mixed_precision bf16" in line]) == lines


def test_cores_are_split_between_processes(monkeypatch):
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert [process.share_of_cores(processes) for processes in (1, 2, 4, 12)] == [6, 3, 1, 1]


def test_every_generator_is_seeded(monkeypatch):
    import random

    import numpy as np

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    process.seed_everything(7)
    first = draw()
    process.seed_everything(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
    process.seed_everything(7)
    assert draw() == first
    of_gpus = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", of_gpus.append)
    process.seed_everything(7)
    assert of_gpus == [7]


def test_fp32_does_not_use_tf32(tiny_run):
    setup.set_up(load_config(tiny_run()))
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32


def test_compiles_only_if_it_saves_time():
    assert should_compile(CPU, "no", 6000.0)[0]
    assert not should_compile(CPU, "no", 100.0)[0]
    assert should_compile(CPU, "bf16", 124.0)[0]  # of which it saves 31
    assert not should_compile(CPU, "bf16", 124.0, max_seconds=90.0)[0]
    assert not should_compile(CPU, "bf16", 50.0)[0]


@pytest.mark.parametrize(
    ("pass_seconds", "steps", "slowest", "compiling"),
    [(0.05, 1000, 0.05, False), (0.055, 1000, 0.055, True), (1.1, 45, 1.1, False), (0.05, 1000, 0.1, True)],
)
def test_a_gpu_compiles_by_the_time_of_a_pass(monkeypatch, pass_seconds, steps, slowest, compiling):
    """It saves 48 % of two passes per step, and costs 50 s. The first pass, which loads kernels, does not count."""
    pending = [30.0, pass_seconds]
    clock = SimpleNamespace(now=0.0)

    def pass_(run: object) -> None:
        clock.now += pending.pop(0)

    monkeypatch.setattr(compilation, "_run_pass", pass_)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(hardware, "synchronize", lambda device: None)
    monkeypatch.setattr(compilation, "missing_compiler", lambda device: None)
    monkeypatch.setattr(compilation, "_on_all_processes", lambda run, work: work())
    monkeypatch.setattr(compilation, "gather", lambda value: [value, slowest if isinstance(value, float) else value])
    run = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cuda")),
        config=load_config([f"--train.max_steps={steps}", "--train.mixed_precision=bf16"]).config,
        step_limit=steps,
        state=SimpleNamespace(step=0),
        accumulation_steps=2,
        stopwatch=Stopwatch(),
        decisions=SimpleNamespace(precision="bf16", sources={}),
    )
    assert compilation.choose_compilation(run) is compiling
    assert not pending


def test_halved_micro_batch_compiles_for_its_own_size(monkeypatch):
    """By default, torch.compile makes a size symbolic that changes, and kernels for any size are slower."""
    kinds = []

    def record(graph, inputs):
        kinds.append([type(each) for each in inputs])
        return graph.forward

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: compile_module(self, backend=record, **kw))

    class Double(torch.nn.Module):  # torch does not compile its own modules alone
        def forward(self, x):
            return 2 * x

    model = Double()
    for size in (4, 2):
        compile_in_place(model, lambda size=size: model(torch.zeros(size, 3)))
    assert kinds == [[torch.Tensor], [torch.Tensor]], "a torch.SymInt is a symbolic size"


DEPTH_SCALE = {"norm_depth_scale": True, "num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 1}
COMPILED = {  # {name: (what makes the model, graphs)}
    "golf": (lambda: GolfForCausalLM(GolfConfig(vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=2)), 3),
    "one layer": (lambda: GolfForCausalLM(GolfConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)), 1),
    "layers that differ": (lambda: GolfForCausalLM(GolfConfig(vocab_size=VOCABULARY, **DEPTH_SCALE)), 5),
    **{
        name: (functools.partial(tiny_model, name), count)
        for name, count in {"llama": 3, "gpt2": 2, "mamba": 3}.items()
    },
}


@pytest.mark.parametrize("name", COMPILED)
def test_layers_that_are_alike_are_compiled_once(name, monkeypatch):
    make, expected = COMPILED[name]
    torch.compiler.reset()
    graphs, seen = [], []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: compile_module(self, backend=record, **kw))
    torch.manual_seed(0)
    model = make().train()
    ids = torch.randint(VOCABULARY, (3, 4))

    def run_once() -> None:
        model.zero_grad()
        loss = model(input_ids=ids, shift_labels=ids.flip(1)).loss
        loss.backward()
        seen.append([loss, *(parameter.grad for parameter in model.parameters())])

    run_once()
    compile_in_place(model, run_once)
    run_once()
    with uncompiled(model):
        run_once()
    assert len(graphs) == expected
    for results in seen[1:]:
        for one, other in zip(seen[0], results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_broken_compiler_falls_back_with_one_line(run, tiny_run, caplog):
    import torch._inductor.config

    eager = run(tiny_run(run__name="eager", train__max_steps=3))
    # not monkeypatch: its cleanup would delete the settings for later tests
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        compiled = run(tiny_run(run__name="compiled", train__max_steps=3, train__compile="true"))
    lines = [line for line in caplog.messages if line.startswith("compile: failed, continuing without")]
    assert len(lines) == 1 and "\n" not in lines[0]
    losses = [[row["train_loss"] for row in read_rows(f / "metrics.jsonl")] for f in (eager, compiled)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("stated", "level"), [("auto", "INFO"), ("true", "WARNING")])
def test_a_machine_without_a_compiler_is_told_in_one_line(tiny_run, monkeypatch, caplog, stated, level):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, "hfgolf"):
        setup.set_up(load_config(tiny_run(train__compile=stated)))
    (record,) = [record for record in caplog.records if record.getMessage().startswith("compile: ")]
    assert record.levelname == level
    assert record.getMessage().endswith(
        "because there is no C++ compiler no-such-compiler; install one, or name one in CXX"
    )


LAUNCHED = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def of_two(monkeypatch) -> Callable[[int], None]:
    """Return a function that makes this process one of two, of which accelerate joins so many."""

    def pretend(joined: int) -> None:
        for key, value in LAUNCHED.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr(process, "meet", lambda launch, patience: None)
        fake = lambda **_: SimpleNamespace(num_processes=joined, device=CPU)  # noqa: E731
        fake._shared_state = {}  # type: ignore[attr-defined]
        monkeypatch.setattr("accelerate.PartialState", fake)

    return pretend


def test_processes_that_accelerate_cannot_join_are_refused(of_two, monkeypatch):
    """As on a Mac, whose GPU only one process can use."""
    of_two(1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(UserError, match="WORLD_SIZE: 2 processes were started, but accelerate can use only 1 on"):
        process.processes()


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("train.py",), None),
        (("--num_processes", "2", "train.py", "--config", "x.yaml"), 2),
        (("--config_file", "multi.yaml", "train.py"), 3),
        (("--config_file", "multi.yaml", "--num_processes=2", "train.py"), 2),
    ],
)
def test_too_few_processes_for_what_accelerate_was_told_are_warned_of(
    launched_by, monkeypatch, tmp_path, caplog, words, asked
):
    """On a CPU, accelerate starts several only through MPI."""
    monkeypatch.chdir(tmp_path)
    Path("multi.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n")
    launched_by("no", *words)
    assert launched.processes_asked_of_accelerate() == asked
    announce_device(resolved(), SimpleNamespace(device=CPU, num_processes=1))
    assert (f"accelerate was told to start {asked} processes" in caplog.text) == (asked is not None)


INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5"], "ib0": ["10.1.0.5", "fe80::5%ib0"]}
WAYS = {"10.0.0.1": "10.0.0.5", "fe80::1": "fe80::5", "127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}
WAYS |= {"first": "10.1.0.5", "myself": "127.0.0.1", process._ELSEWHERE: "10.0.0.5"}


@pytest.mark.parametrize(
    ("environment", "interface"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, "lo"),  # one machine
        ({"LOCAL_WORLD_SIZE": "2", "NCCL_SOCKET_IFNAME": "ib0"}, "ib0"),
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "NCCL_SOCKET_IFNAME": "=ib0"}, "ib0"),
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "first", "NCCL_SOCKET_IFNAME": "^docker0"}, "ib0"),  # not eth0
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}, "eth0"),
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "fe80::1"}, "ib0"),
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, "lo"),  # two launchers on one machine
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "myself"}, "eth0"),  # /etc/hosts: 127.0.1.1 myself
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "unknown"}, None),
        ({"MASTER_ADDR": "localhost"}, "lo"),  # a launcher that does not say how many are on this machine
    ],
)
def test_gloo_listens_where_the_other_processes_find_it(monkeypatch, environment, interface):
    def addresses(of: list[str]) -> list[Any]:
        families = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in of]
        return [SimpleNamespace(family=family, address=one) for family, one in zip(families, of, strict=True)]

    monkeypatch.setattr("psutil.net_if_addrs", lambda: {name: addresses(of) for name, of in INTERFACES.items()})
    monkeypatch.setattr(process, "_own_address_towards", WAYS.get)
    for key in ("NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(key, raising=False)
    for key, value in (environment | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(key, value)
    assert process.gloo_interface() == interface


@pytest.mark.parametrize("stated", [None, "eth7"])
def test_gloo_interface_of_the_user_stays(of_two, monkeypatch, stated):
    of_two(2)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if stated:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", stated)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(process, "gloo_interface", lambda: "eth0")
    process.processes()
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == (stated or "eth0")


def test_own_address_is_the_one_towards_the_host():
    assert process._own_address_towards("127.0.0.1") == "127.0.0.1"
    assert process._own_address_towards("no.such.host.invalid") is None


def test_memory_freed_by_set_up_is_given_back_and_by_a_step_reused():
    """Without it, each round would page-fault 50 MB again: 12,000 pages."""
    program = (
        "import psutil, resource, torch\n"
        "from hfgolf.config.sections import RunConfig\n"
        "from hfgolf.train.process import trim_memory, tune_memory\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(50 * 2**18)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "returned = [faults() for _ in range(4)]\n"
        "tune_memory(RunConfig())\n"
        "tensors = [torch.ones(2**18) for _ in range(100)]\n"  # 1 MB each
        "del tensors[:-1]\n"  # the last one keeps the heap from shrinking
        "before = psutil.Process().memory_info().rss\n"
        "trim_memory()\n"
        "freed = before - psutil.Process().memory_info().rss\n"
        "kept = [faults() for _ in range(8)]\n"
        "print(freed, min(returned), sorted(kept)[4])\n"  # the heap may have to grow a second time
    )
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    freed, returned, kept = map(int, done.stdout.split())
    assert freed > 90e6 and returned > 1000 and kept < 100


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tell_large_pages(answer: Any) -> None:
    """Send how much memory of 64 MB is in large pages. The imports before must not have made torch decide."""
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    process.tune_memory(RunConfig())
    tensor = torch.ones(2**24)
    in_large_pages = Path("/proc/self/smaps_rollup").read_text().split("AnonHugePages:")[1].split()[0]
    answer.send(1024 * int(in_large_pages) / tensor.nbytes)


@pytest.mark.skipif(not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="no large pages here")
def test_tensors_of_small_models_use_large_pages():
    answers, answer = FORKING.Pipe(duplex=False)
    process_ = FORKING.Process(target=tell_large_pages, args=(answer,))
    process_.start()
    assert answers.recv() > 0.9
    process_.join()


@pytest.mark.parametrize(
    ("dropout", "words"),
    [(0.0, "sdpa, SDPA's flash kernel, q, k and v in "), (0.1, "sdpa, SDPA's math kernel, q, k and v in ")],
)
def test_log_says_how_attention_is_computed(tiny_run, caplog, dropout, words):
    with caplog.at_level(logging.DEBUG, "hfgolf"):
        setup.set_up(load_config(tiny_run(model__attention_dropout=dropout)))
    assert f"attention: {words}torch.float32" in caplog.messages


def test_fp32_cast_inside_attention_is_reported_under_bf16(tiny_run, monkeypatch, caplog):
    """Although q, k and v come from autocast in bf16."""

    def in_fp32(query, key, value, *arguments):
        with torch.autocast("cpu", enabled=False):
            return real(query.float(), key.float(), value.float(), *arguments).to(query.dtype)

    real = causal_blocks.causal_blocks
    monkeypatch.setattr(causal_blocks, "causal_blocks", in_fp32)
    with caplog.at_level(logging.DEBUG, "hfgolf"):
        setup.set_up(load_config(tiny_run(train__mixed_precision="bf16")))
    assert "attention: causal_blocks, q, k and v in torch.float32" in caplog.messages
