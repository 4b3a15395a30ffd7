"""What commit 1b62f13 wrote still works: checkpoints, run folders, configs, exported models and token caches.

files.tar.xz holds three runs of ten steps (Golf with Muon and an average of the weights, Llama with AdamW, and Golf
with switches of the golf records on the grid of a budget), each in the middle (stopped/) and at its end (runs/), their
exports, and the configs and experiments of that commit. expected.json has the logits that it computed, keys.json its
keys with an example each, and the values that it read from each config. tests/old/make.py of commit cf720fc made them.

They go through doors that stay: the command `hfgolf` and the names in `hfgolf.__all__`.
"""

from __future__ import annotations

import inspect
import io
import json
import shlex
import shutil
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from golden.test_golden_losses import RELATIVE_TOLERANCE, machine
from transformers import AutoModelForCausalLM

import hfgolf

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
OLD = json.loads((HERE / "keys.json").read_text(encoding="utf-8"))
EXPECTED = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
DEFAULTS = {key: about["default"] for key, about in OLD["keys"].items()}
RUNS = ["golf", "llama", "tricks"]
PROMPT_IDS = [list(range(3, 35)), [200] * 16 + list(range(60, 76))]
_MOVED_TO_OVERRIDES = (
    *("rope_theta", "activation_slope", "logit_soft_cap", "norm_eps", "norm_weight", "query_gain", "branch_scale"),
    *("embedding_residual", "unet_skips", "tied_embedding_std", "matrix_init", "rope_dims", "norm_depth_scale"),
    *("exclude_self_value", "parallel_from", "lanes", "loop", "head_gate", "head_gate_scale", "head_gate_peak"),
    *("smear_gate", "attention_span", "bigram_buckets", "bigram_size", "value_embedding_layers"),
    *("value_embedding_size", "embedding_size", "soft_cap_form", "logit_soft_cap_negative"),
)
_GONE = (
    *("data.prefetch_factor", "optim.momentum_end", "optim.nesterov", "optim.split_qkv"),
    *("schedule.warmdown_shape", "track.run_name", "train.min_improvement", "train.rollback_learning_rate_factor"),
    *("golf.column_steps", "golf.damping"),
)
HALF_LIFE = "optim.ema_half_life_tokens"  # now optim.ema_decay, the same decay in other units
MOVED: dict[str, str | None] = {
    **{f"model.{name}": f"model.overrides.{name}" for name in _MOVED_TO_OVERRIDES},
    **dict.fromkeys(_GONE),
    HALF_LIFE: "optim.ema_decay",
}
"""{key of then: the key that has its value now, such as model.overrides.lanes, or None if there is none}. Such a key is
taken with the same effect, or refused by one line that names the new one, or says that it is gone."""
NEW_DEFAULTS = {"tokenizer.vocab_size": "auto", "optim.row_equilibration": True, "optim.normuon_beta2": 0.95}
"""{key: a default that changed on purpose}."""


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(HERE / "files.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder: what the old commit left in its own."""
    shutil.copytree(unpacked, tmp_path / "old", symlinks=True)
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


@pytest.fixture
def stopped(old: Path) -> Path:
    """Return runs/, with the runs in the middle; the complete ones are in complete/."""
    (old / "runs").rename(old / "complete")
    return (old / "stopped").rename(old / "runs")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs `hfgolf ...` in this process and returns its status, output and errors."""
    (door,) = entry_points(group="console_scripts", name="hfgolf")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hfgolf", *arguments])
        with pytest.raises(SystemExit) as ended:
            door.load()()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def read(*arguments: str) -> dict[str, Any]:
    """Return {"section.key": value} of a command line, with JSON's types."""
    values = hfgolf.load_config(list(arguments)).config.flat()
    for name, value in values.get("model.overrides", {}).items():
        values[f"model.overrides.{name}"] = value
    return json.loads(json.dumps(values))


def assert_same_values(now: dict[str, Any], then: dict[str, Any]) -> None:
    """then: what differed from the defaults of the old commit."""
    then = {"optim.ema_decay": now["optim.ema_decay"]} | then if HALF_LIFE in then else then
    for key, value in (DEFAULTS | NEW_DEFAULTS | then).items():
        if key == "model.overrides":  # its fields are compared one by one
            continue
        new = MOVED.get(key, key)
        if new is not None and (key not in MOVED or key in then):
            assert now.get(new, DEFAULTS[key]) == in_new_units(key, value, now), key


def in_new_units(key: str, value: Any, now: dict[str, Any]) -> Any:
    """Return what the new key holds for a value of the old one."""
    return value if key != HALF_LIFE or value is None else 0.5 ** (now["batch.tokens_per_step"] / value)


@pytest.mark.parametrize("key", OLD["keys"])
def test_each_old_key_has_the_same_effect_or_says_in_one_line_where_it_went(key, tmp_path):
    about = OLD["keys"][key]
    section, name = key.split(".")
    file = tmp_path / "old.yaml"
    file.write_text(f"{section}:\n  {name}: {about['example']}\n", encoding="utf-8")
    others = [*([] if key == "train.max_steps" else ["--train.max_steps=7"]), *about["others"]]
    for stated in (f"--{key}={about['example']}", f"--config={file}"):
        try:
            now = read(*others, stated)
        except hfgolf.UserError as error:
            said = str(error)
            assert key in MOVED, said
            assert "\n" not in said and name in said and (MOVED[key] or "gone") in said
        else:
            new = MOVED.get(key, key)
            assert new is None or now[new] == in_new_units(key, about["read"], now)


@pytest.mark.parametrize("file", OLD["files"])
def test_each_old_config_loads_to_the_same_values(file, old):
    assert_same_values(read(f"--config={file}"), OLD["files"][file])


@pytest.mark.slow
@pytest.mark.parametrize("base", sorted({arguments.split()[0] for arguments in OLD["experiments"]}))
def test_each_arm_of_an_old_experiment_loads_to_the_same_values(base, old):
    of_base = OLD["files"][base.removeprefix("--config=")]
    for arguments, then in OLD["experiments"].items():
        if arguments.startswith(base):
            options = (option.partition("=") for option in shlex.split(arguments))
            names = {**MOVED, HALF_LIFE: HALF_LIFE}
            keys = [(names.get(key[2:], key[2:]), value) for key, _, value in options]
            assert_same_values(read(*(f"--{key}={value}" for key, value in keys if key is not None)), of_base | then)


def test_overrides_of_another_architecture_win_over_the_defaults_that_an_old_run_listed(tmp_path):
    sections: dict[str, dict[str, Any]] = {}
    own = {"model.architecture": "lfm2", "model.overrides": {"norm_eps": 1e-3}, "train.max_steps": 3}
    for key, value in (DEFAULTS | own).items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(sections), encoding="utf-8")
    assert DEFAULTS["model.norm_eps"] == 1e-6
    assert read(f"--config={tmp_path / 'config.yaml'}")["model.overrides"] == {"norm_eps": 1e-3}


@pytest.mark.parametrize("name", RUNS)
def test_the_config_of_an_old_run_is_taken_as_the_run_wrote_it(name, old):
    said = Path(f"{name}.yaml").read_text(encoding="utf-8")
    unstated = [key for key in NEW_DEFAULTS if f"{key.split('.')[1]}:" not in said]
    then = read(f"--config={name}.yaml") | {key: DEFAULTS[key] for key in unstated}
    assert read(f"--config=runs/{name}/config.yaml") == then


@pytest.mark.parametrize("name", ["golf", "llama", pytest.param("tricks", marks=pytest.mark.slow)])
def test_an_old_run_goes_on_with_the_losses_that_it_had(name, stopped, command):
    status, out, err = command("train", f"--config={name}.yaml", "--train.resume=auto")
    assert status == 0, out + err
    assert_went_on(name, out + err)


@pytest.mark.slow
def test_an_old_run_goes_on_from_its_own_config_without_its_token_cache(stopped, command):
    shutil.rmtree("cache")
    status, out, err = command("train", "--config=runs/golf/config.yaml", "--train.resume=auto")
    assert status == 0, out + err
    assert_went_on("golf", out + err)


def assert_went_on(name: str, said: str) -> None:
    """said: what the run printed, which went on from step 5."""
    assert "step 6/10" in said and "step 4/10" not in said
    now, then = rows_of(Path("runs", name)), rows_of(Path("complete", name))
    assert [row["step"] for row in now] == [row["step"] for row in then] == list(range(1, 11))
    assert [row["sample_hashes"] for row in now] == [row["sample_hashes"] for row in then]
    is_same_machine = machine() == EXPECTED["machine"]
    for column in ("train_loss", "grad_norm", "learning_rate", "val_loss", "val_bits_per_byte", "val_loss_ema"):
        values = [(row["step"], row.get(column), one.get(column)) for row, one in zip(now, then, strict=True)]
        for step, value, before in values:
            if before is None:
                continue
            # from step 6 on, its grid depends on the bytes of score.py, which has grown by 44 since
            is_same = name != "tricks" or step < 6
            if is_same and is_same_machine:
                assert value == before, f"{column} of step {step} differs in its last bits"
            tolerance = RELATIVE_TOLERANCE if is_same else 1e-4
            assert value == pytest.approx(before, rel=tolerance, abs=0), (column, step)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "event" not in row]


@pytest.mark.parametrize("name", RUNS)
def test_an_old_complete_run_is_left_alone_and_told(name, old, command):
    before = {path: path.read_bytes() for path in (old / "runs" / name / "model").iterdir()}
    status, out, err = command("train", f"--config={name}.yaml")
    assert status == 0 and f"runs/{name} is complete" in out + err
    assert {path: path.read_bytes() for path in (old / "runs" / name / "model").iterdir()} == before
    summary = json.loads((old / "runs" / name / "summary.json").read_text(encoding="utf-8"))
    for run in (hfgolf.open_run(f"runs/{name}"), hfgolf.fit(config=f"{name}.yaml")):
        assert run.folder == Path("runs", name)
        assert all(run.summary[figure] == summary[figure] for figure in ("steps", "val_loss", "val_bits_per_byte"))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("place", ["runs", "stopped"])
def test_an_old_run_is_reported_examined_and_read(name, place, old, command):
    status, _, err = command("report", f"{place}/{name}")
    assert status == 0, err
    page = (old / place / name / "report.html").read_text(encoding="utf-8")
    if place == "runs":
        summary = json.loads((old / place / name / "summary.json").read_text(encoding="utf-8"))
        assert f"{summary['val_bits_per_byte']:.4f}" in page
    else:
        assert "Stopped by SIGTERM at step 5" in page
    assert command("doctor", f"{place}/{name}")[0] in (0, 1)
    losses = hfgolf.open_run(old / place / name).metrics.train_loss.tolist()
    assert losses == [row["train_loss"] for row in rows_of(old / place / name)]
    assert len(losses) == {"runs": 10, "stopped": 4}[place]  # the fifth was not due


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_generates_and_chats(name, old, command, monkeypatch):
    options = ("--max_new_tokens=8", "--temperature=0")
    for model in (f"runs/{name}", f"runs/{name}/model", f"stopped/{name}", f"stopped/{name}/checkpoints/latest"):
        status, out, err = command("generate", model, "7 times", *options)
        assert status == 0 and out.startswith("7 times"), err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"7 times\n")))
    status, out, err = command("chat", f"runs/{name}", *options)
    assert status == 0 and out != "", err


@pytest.mark.parametrize("name", RUNS)
def test_an_old_model_has_the_loss_that_its_run_recorded(name, old, command):
    (old / "val.txt").write_text((old / "text.txt").read_text(encoding="utf-8")[-1987:], encoding="utf-8")
    status, out, err = command("evaluate", f"runs/{name}", "val.txt", "--json")
    assert status == 0, err
    summary = json.loads((old / "runs" / name / "summary.json").read_text(encoding="utf-8"))
    assert json.loads(out)["bits_per_byte"] == pytest.approx(summary["val_bits_per_byte"], rel=1e-3)


@pytest.mark.parametrize("whose", ["the code beside the weights", "the code of today"])
@pytest.mark.parametrize("path", EXPECTED["last_logits"])
def test_an_old_exported_model_has_the_same_logits(path, whose, unpacked):
    if whose == "the code of today" and "llama" not in path and "native" not in path:
        model = hfgolf.GolfForCausalLM.from_pretrained(unpacked / path)
    else:
        model = AutoModelForCausalLM.from_pretrained(unpacked / path, trust_remote_code=True)
    assert_same_logits(model, path)


def assert_same_logits(model: Any, path: str, atol: float = 1e-5) -> None:
    with torch.no_grad():
        last = model.eval()(torch.tensor(PROMPT_IDS)).logits[:, -1].float()
    torch.testing.assert_close(last, torch.tensor(EXPECTED["last_logits"][path]), rtol=1e-5, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["golf", "tricks"])
def test_export_renews_the_code_of_an_old_model_and_keeps_its_logits(name, old, command):
    status, _, err = command("export", "--run", f"runs/{name}", "--to", "golf", "--output", "again")
    assert status == 0, err
    model = AutoModelForCausalLM.from_pretrained(old / "again", trust_remote_code=True)
    # a checkpoint has the weights before they are rounded to the grid, as it had then
    assert_same_logits(model, f"runs/{name}/model", atol=1e-3 if name == "tricks" else 1e-5)
    code = Path(inspect.getfile(hfgolf.GolfForCausalLM)).parent
    assert (old / "again" / "modeling_golf.py").read_bytes() == (code / "modeling_golf.py").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_that_was_stopped_is_exported(name, old, command):
    status, _, err = command("export", "--run", f"stopped/{name}")
    assert status == 0, err
    model = AutoModelForCausalLM.from_pretrained(old / "stopped" / name / "model", trust_remote_code=True)
    assert model.config.hidden_size == 16


@pytest.mark.slow
def test_an_old_model_is_converted_to_its_native_form_and_back(old, command):
    for source, to in (("runs/golf/model", "native"), ("exports/native", "golf")):
        status, _, err = command("export", "--model", source, "--to", to, "--output", f"new-{to}")
        assert status == 0, err
        model = AutoModelForCausalLM.from_pretrained(old / f"new-{to}", trust_remote_code=True)
        assert_same_logits(model, "runs/golf/model")


def test_an_old_golf_export_is_not_run_and_one_line_says_why(old, command):
    status, out, err = command("golf", "score", "runs/tricks/golf")
    assert status in (1, 2) and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and "runs/tricks/golf" in err


@pytest.mark.slow
def test_an_old_run_on_a_grid_is_exported_for_golf_with_the_same_score(old, command):
    then = json.loads((old / "runs/tricks/golf/ledger.json").read_text(encoding="utf-8"))
    status, out, err = command("golf", "export", "--run", "runs/tricks", "--output", "again")
    assert status == 0, err
    status, out, err = command("golf", "score", "again", "--json")
    assert status == 0, err
    now = json.loads(out)
    assert now["nats"] == pytest.approx(then["after"]["nats"], rel=1e-4)
    assert now["counted_bytes"] <= then["budget_bytes"]


@pytest.mark.slow
def test_old_runs_are_compared(old, command):
    runs = [f"runs/{name}" for name in RUNS]
    status, _, err = command("compare", *runs, "--output_dir", "compared")
    assert status == 0, err
    (page,) = (old / "compared").glob("*.md")
    assert all(name in page.read_text(encoding="utf-8") for name in RUNS)
