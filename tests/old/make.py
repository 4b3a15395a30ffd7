"""Make tests/old/files.tar.xz and keys.json: what commit 1b62f13 wrote, for tests that later versions still take it.

    git worktree add old 1b62f13 && cd old && make setup
    .venv/bin/python ../tests/old/make.py ../tests/old

This file runs on that commit only. Nothing imports it.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from hfgolf.tools.compare.experiment import load_experiment, plan_runs
from transformers import AutoModelForCausalLM

import hfgolf
from hfgolf.config.parse import KEY_TYPES, load_config
from hfgolf.config.sections import RunConfig

os.environ["TORCHINDUCTOR_CACHE_DIR"] = "inductor"  # metadata.json has it
sys.path.append(str(Path(__file__).resolve().parents[1]))
CONFIGS = sorted(map(str, [*Path("configs").glob("*.yaml"), *Path("benchmarks/experiments/configs").glob("*.yaml")]))
EXPERIMENTS = sorted(map(str, Path("benchmarks/experiments").glob("*.yaml")))
UNIQUE = ("--run.name=", "--run.seed=", "--run.output_dir=", "--train.resume=")
STOP_AT, STEPS = 5, 10
COMMON = {
    "run": {"seed": 1},
    "data": {
        "files": ["text.txt"],
        "source": "files",
        "split": "contiguous",
        "val_fraction": 0.1,
        "cache_dir": "cache",
    },
    "tokenizer": {"kind": "byte"},
    "batch": {"sequence_length": 32, "tokens_per_step": 256, "micro_batch_size": 4},
    "schedule": {"warmup_steps": 2},
    "train": {
        **{"max_steps": STEPS, "mixed_precision": "no", "cpu_threads": 1, "compile": False, "deterministic": True},
        **{"log_every_steps": 1, "eval_every_steps": STOP_AT, "eval_tokens": 1024, "sample_tokens": 8, "keep_last": 1},
    },
}
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "golf": {
        "model": SHAPE | {"dropout": 0.1},
        # fp32 by name: auto meant bf16 at that commit if the hardware is fast at it, and means fp32 in an fp32 run now
        "optim": {"newton_schulz_dtype": "fp32", "ema_decay": 0.9, "adamw_learning_rate": 0.01},
    },
    "llama": {
        "model": SHAPE | {"architecture": "llama", "num_hidden_layers": 1},
        "optim": {"name": "adamw", "learning_rate": 0.003},
    },
    "tricks": {  # switches of the golf records, training on the grid, and forecasts
        "model": SHAPE
        | {
            "activation": "leaky_relu2",
            "tie_word_embeddings": False,
            "unet_skips": "gated",
            "value_embedding_layers": 1,
        }
        | {"value_embedding_size": 8, "smear_gate": 4, "head_gate": 4, "bigram_buckets": 32, "bigram_size": 8}
        | {"exclude_self_value": "all", "rope_dims": 4, "norm_depth_scale": True, "logit_soft_cap": 15.0},
        "optim": {"newton_schulz_dtype": "fp32", "normuon_beta2": 0.95, "cautious_weight_decay": True},
        "golf": {"budget_bytes": 30000, "qat_fraction": 0.5, "calibration_tokens": 512, "forecast_every_steps": 4},
    },
}
DROPPED = re.compile(r"/report$|/report\.|\.lock$|hashes\.json$|/abandoned-|/inductor|^\./runs/llama/checkpoints$")
PROMPT_IDS = [list(range(3, 35)), [200] * 16 + list(range(60, 76))]
SHARDS = ["--data.source=shards", "--data.files=[a.bin]", "--data.val_files=[b.bin]", "--tokenizer.kind=byte"]
# Keys whose value needs others, or that no rule below finds an example for: {key: [value, other arguments ...]}.
EXAMPLES: dict[str, list[str]] = {
    "run.name": ["mine"],
    "data.source": ["hub", "--data.hub_name=user/name"],
    "data.ids_column": ["ids", "--data.files=[a.parquet]", "--tokenizer.kind=byte"],
    "data.messages_column": ["messages", "--data.files=[a.jsonl]"],
    "data.val_files": ["[val.txt]", "--data.files=[a.txt]"],
    "data.old_text": ["[old.txt]", "--model.init_from=weights"],
    "data.val_bytes_files": ["[bytes.bin]", *SHARDS],
    "data.separator_id": ["0", *SHARDS],
    "data.in_memory": ["true"],
    "data.prefetch_factor": ["2", "--data.num_workers=1"],
    "model.overrides": ["{rope_theta: 1000.0}", "--model.architecture=llama"],
    "model.parallel_from": ["2"],
    "model.lanes": ["true", "--model.parallel_from=2"],
    "model.loop": ["[1, 2, 2]"],
    "model.soft_cap_form": ["poly5", "--model.logit_soft_cap=15.0"],
    "model.logit_soft_cap_negative": ["10.0", "--model.logit_soft_cap=15.0"],
    "optim.ema_export": ["true", "--optim.ema_decay=0.9"],
    "schedule.loop_start": ["0.5", "--model.loop=[1, 2, 2]"],
    "schedule.warmdown_shape": ["1-sqrt"],
    "train.compile": ["true"],
    "train.rollback_on": ["[spike]"],
    "track.trackers": ["[tensorboard]"],
    "hub.push": ["true", "--hub.repo_id=user/name"],
    "hub.license": ["mit"],
    "hub.language": ["[en]"],
    "golf.qat_fraction": ["0.5", "--golf.budget_bytes=30000"],
}


class StopAt(hfgolf.Callback):
    """Ask the process to end after a step, as a scheduler does."""

    def on_step(self, moment: Any) -> None:
        if moment.step == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)


def train_to_the_middle(name: str, folder: Path) -> None:
    stopped = subprocess.run([sys.executable, Path(__file__).resolve(), "--stopped", f"{name}.yaml"], cwd=folder)
    assert stopped.returncode == 128 + signal.SIGTERM


def hfgolf_command(folder: Path, *arguments: str) -> None:
    subprocess.run([Path(sys.executable).with_name("hfgolf"), *arguments], cwd=folder, check=True)


def write_runs(folder: Path) -> dict[str, Any]:
    """Train each run to the middle, keep it, and train it to the end; return the logits of the models."""
    lines = (f"{n} times {n % 13} is {n * (n % 13)}, not {n * 7 % 90}.\n" for n in range(700))
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    for name, sections in RUNS.items():
        config = {section: COMMON.get(section, {}) | sections.get(section, {}) for section in {**COMMON, **sections}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        train_to_the_middle(name, folder)
        shutil.copytree(folder / "runs" / name, folder / "stopped" / name, symlinks=True)
        hfgolf_command(folder, "train", f"--config={name}.yaml", "--train.resume=auto")
    export = ("export", "--model", "runs/golf/model", "--to")
    hfgolf_command(folder, *export, "native", "--output", "exports/native")
    hfgolf_command(folder, "golf", "export", "--run", "runs/tricks", "--compare_seconds", "0")
    models = ("runs/golf/model", "runs/llama/model", "runs/tricks/model", "runs/tricks/golf/model", "exports/native")
    logits = {}
    for path in models:
        model = AutoModelForCausalLM.from_pretrained(folder / path, trust_remote_code=True)
        with torch.no_grad():
            last = model(torch.tensor(PROMPT_IDS)).logits[:, -1].float()
        logits[path] = [[float(f"{value:.7g}") for value in row] for row in last.tolist()]
    return {"last_logits": logits}


def examples(key: str, default: Any) -> list[str]:
    """Return values of a key that may differ from its default and be allowed."""
    if isinstance(default, bool):
        return [str(not default).lower()]
    if isinstance(default, int | float):
        return [str(value) for value in (default * 2, default / 2, 1, 0.5)]
    kind = str(KEY_TYPES[key])
    choices = re.findall(r"'(\w+)'", kind) if "Literal" in kind else []
    texts = ["[user/name]" if "list" in kind else "user/name"] if "str" in kind else []
    return [*choices, *texts, "2", "0.5", "[0.5, 0.5]"]


def write_keys(path: Path) -> None:
    """Write each key's default and an example, and what each config file of the commit changes."""
    defaults = RunConfig().flat()
    keys: dict[str, Any] = {}
    for key, default in defaults.items():
        value, *others = EXAMPLES.get(key, [""])
        for candidate in [value] if value else examples(key, default):
            try:
                read = load_config(["--train.max_steps=7", *others, f"--{key}={candidate}"]).config.flat()[key]
            except hfgolf.UserError:
                continue
            if read != default:
                keys[key] = {"default": default, "example": candidate, "read": read, "others": others}
                break
        else:
            raise SystemExit(f"{key}: no example is allowed; give it one in EXAMPLES")
    files: dict[str, Any] = {}
    for file in CONFIGS:
        resolved = load_config([f"--config={file}"])
        stated = {key: value for key, value in resolved.config.flat().items() if key in resolved.sources}
        files[file] = stated | changed(resolved.config, RunConfig())
    experiments: dict[str, Any] = {}
    for file in EXPERIMENTS:
        for planned in plan_runs(load_experiment(Path(file)), Path("runs"), []):
            arguments = [argument for argument in planned.arguments if not argument.startswith(UNIQUE)]
            base = load_config(arguments[:1]).config
            experiments[shlex.join(arguments)] = changed(load_config(arguments).config, base)
    path.write_text(json_lines({"keys": keys, "files": files, "experiments": experiments}), encoding="utf-8")


def json_lines(content: dict[str, dict[str, Any]]) -> str:
    """Return JSON with one line per entry of each dict in a dict."""
    parts = {
        name: "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()) + "\n}"
        for name, part in content.items()
    }
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in parts.items()) + "\n}\n"


def changed(config: RunConfig, base: RunConfig) -> dict[str, Any]:
    values = base.flat()
    return {key: value for key, value in config.flat().items() if value != values[key]}


def write_files(folder: Path, path: Path) -> None:
    """Pack a folder without reports, locks, and what names the folder itself."""
    for file in folder.rglob("metadata.json"):
        text = file.read_text(encoding="utf-8")
        for place in (folder, Path(__file__).resolve().parent):
            text = text.replace(f"{place}/", "")
        file.write_text(text, encoding="utf-8")

    def packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if DROPPED.search(member.name) else member

    with tarfile.open(path, "w:xz", preset=9) as archive:
        archive.add(folder, ".", filter=packed)


def main() -> None:
    if sys.argv[1] == "--stopped":
        hfgolf.train(sys.argv[2], callbacks=[StopAt()])
    output = Path(sys.argv[1]).resolve()
    write_keys(output / "keys.json")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in [*CONFIGS, *EXPERIMENTS]:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / file)
        from golden.test_golden_losses import machine

        expected = {"machine": machine(), **write_runs(folder)}
        (output / "expected.json").write_text(json_lines(expected), encoding="utf-8")
        write_files(folder, output / "files.tar.xz")


if __name__ == "__main__":
    main()
