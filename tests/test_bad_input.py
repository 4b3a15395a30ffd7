"""Each mistake gives one clear line and exit status 2, before any work, and leaves nothing behind.

The mistakes that a config alone shows are in test_command_line.py.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hfgolf.config.sections import TokenizerSection
from hfgolf.data.tokenizer import find_tokenizer

ABSURD = ("0", "-1", "nan", "inf", "1e308", str(10**30), "9" * 5000, "many")
NUMBERS = {
    "compare": "--jobs",
    "evaluate": "--sequence_length --batch_size --stride --adapt_rate*",
    "find_lr": "--steps --lowest --highest",
    "golf plan": "--budget_bytes --minutes --tokens --processes --mfu --sequence_length",
    "golf record": "--margin_nats* --significance --reference*",
    "generate": "--max_new_tokens --temperature* --top_k* --top_p --num_samples --seed*",
    "ladder.py": "--repetitions --losses",
    "report": "--price_per_hour*",
    "plan": "--tokens_per_second",
    "profile": "--steps",
    "verify_resume": "--steps --kills* --kill_seed* --num_processes",
    "vocabulary_study.py": "--vocab_sizes --hidden_size --context --max_bytes",
}
"""{script: its options for numbers, with a * if 0 is one}."""


@pytest.mark.parametrize(
    ("script", "option"), [(script, option) for script in NUMBERS for option in NUMBERS[script].split()]
)
def test_absurd_number_is_one_line(run_script, tmp_path, monkeypatch, script, option):
    monkeypatch.chdir(tmp_path)
    needed = {"vocabulary_study.py": ("--files", "text.txt")}.get(script, ())
    for text in ABSURD:
        if text == "0" and option.endswith("*"):
            continue
        status, printed, error = run_script(script, *needed, option.rstrip("*"), text)
        assert (status, printed, error.count("\n")) == (2, "", 1), (text, error)
        assert option[2:].rstrip("*") in error and "allowed: " in error and len(error) < 250, error
    assert list(tmp_path.iterdir()) == []


OF_A_CONFIG = "the options of a tiny run"
MISTAKES = {  # script: what comes before the mistake, then {mistake: what the line says, "..." for anything between}
    "compare": (
        "",
        {
            "": "the following arguments are required: paths; `... --help` shows what it takes.\n",
            "nothing.yaml": "there is no definition nothing.yaml; name one, such as benchmarks/",
            "nothing": "there is no run nothing; runs here: none.",
            "nothing tiny.yaml": "there is no run nothing; runs here: none.",
            "nothing --jobs 2": "--jobs: only for a definition; run folders are only read",
            "nothing --train.max_steps 3": "--train.max_steps: only for a definition; run folders are only read",
            "a.yaml b.yaml": "b.yaml: only one definition is allowed, or the folders of runs.",
            "tiny.yaml --train.max_stops 3": "the command line: unknown key train.max_stops; did you",
            "tiny.yaml --output_dir tiny.yaml/x": "--output_dir: cannot write to tiny.yaml/x (Not a dir",
        },
    ),
    "evaluate": (
        "--model gpt2 --files text.txt",
        {
            "--model nowhere": "--model: cannot load nowhere",
            "--model small": "id 256, ... 256 entries",
            "--files none.txt": "--files: no file matches 'none.txt'",
            "--files latin.txt": "latin.txt is not UTF-8",
            "--files chat.jsonl": "chat.jsonl has no column 'text'.\n",
            "--files cut.txt": "its last character is cut, ... restore the end, or convert it to UTF-8.\n",
            "--files ids.bin": "ids.bin is not text.\n",
            "--files table.csv": "set --text_column to one of them, as in --text_column body; if",
            "--sequence_length 17": "--sequence_length: 17 ... 1 to 16",
            "--mixed_precision fp16": "mixed_precision: fp16",
            "--stride 8": "--stride needs --evaluation sliding or documents",
            "--evaluation sliding --drop_tail": "needs --evaluation flat",
            "--evaluation documents --stride 17": "--stride: 17 ... 1 to 16",
            "--files short.txt --drop_tail": "to score: 10 tokens, windows of 16; without --drop_tail, it is scored.\n",
            "--per_document --evaluation sliding": "--per_document ... leave out --evaluation.",
            "--adapt_rate 0.1 --drop_tail": "--adapt_rate scores every token",
            "--adapt_rate 0.1 --per_document": "--per_document ... leave out --adapt_rate.",
            "--train_files text.txt": "--train_files is for --certificate",
        },
    ),
    "find_lr": (
        OF_A_CONFIG,
        {
            "--lowest 1 --highest 0.1": "--lowest 1, --highest 0.1: allowed: 0 < lowest < highest.",
            "--steps 3": "--steps: 3 is out of range; allowed: 20 to 1000000.",
            "--output rates.json": "--output: rates.json can't be written; allowed: a name that ends in .",
            "--train.max_steps null": "train: the run has no limit; set",
        },
    ),
    "generate": (
        "--model gpt2",
        {
            "--model nowhere": "--model: cannot load nowhere",
            "--max_tokens 9": "unrecognized arguments: --max_tokens; did you mean --max_new_tokens?\n",
            "--temperature 1e-300": "--temperature: 1e-300 is out of range; allowed: 0, or 0.001 to 1000000.",
            f"--seed {2**70}": "--seed: 1180591620717411303424 is out of range; allowed: 0 to",
            "--prompt caf\udce9": "--prompt: not UTF-8; convert it, or set the terminal to UTF-8.",
            f"--prompt {'x' * 16}": "The prompt has 16 tokens, but this model takes at most 14; shorten it.",
        },
    ),
    "ladder.py": (
        OF_A_CONFIG,
        {"--train.max_step 3": "unknown key train.max_step; did you mean train.max_steps?"},
    ),
    "plan": (
        OF_A_CONFIG,
        {
            "--dollars 15": "--dollars: the price is not known; add --run.price_per_hour",
            "--price_per_hour 3": "unknown key price_per_hour; did you mean run.price_per_hour?",
            "--minutes nan": "--minutes: 'nan' is not allowed; allowed: a number above 0",
            "--minutes 1 --tokens_per_second 1": "--minutes: 60 s is too short for one step of 256 tokens",
            "--device abacus": "--device: abacus is not in the table; known: B300, ",
            "--batch.micro_batch_size 3": "batch.tokens_per_step: 256 is not a multiple of micro-batches of 3",
            "--device T4 --minutes 1 --model.hidden_size 65536": "not even one sequence of 32 tokens fits: it needs",
        },
    ),
    "profile": (
        OF_A_CONFIG,
        {"--optim.learning_rat 1": "unknown key optim.learning_rat; did you mean optim.learning_rate?"},
    ),
    "roofline.py": (
        OF_A_CONFIG,
        {"--batch.tokens_per_step 5": "batch.tokens_per_step: 5 is not a multiple of batch.sequence_length 32"},
    ),
    "schedule": (
        OF_A_CONFIG,
        {
            "--schedule.warmdown_shape 1-sqrt": "schedule.warmdown_shape is gone; leave it out",
            "--schedule.weight_decay 0.1": "0.1 is not allowed; allowed: constant, linear or learning_rate.",
            "--schedule.peak 1": "unknown key schedule.peak",
            "--output schedule.json": "--output: schedule.json can't be written; allowed: a name that ends in .",
        },
    ),
    "train.py": (
        OF_A_CONFIG,
        {
            "--data.files latin.txt": "latin.txt is not UTF-8 (byte 0: ... it is probably Latin-1, ...data.encoding",
            "--data.files short.txt": "sequence_length",
            "--tokenizer.kind bpe --tokenizer.vocab_size 50000": "tokenizer.vocab_size: 50000",
            "--tokenizer.kind pretrained --tokenizer.name_or_path .": "tokenizer.name_or_path",
            "--model.hidden_size 131072 --model.num_hidden_layers 100": (
                "not even one sequence of 32 tokens fits: it needs ... GB free; try ... or a smaller model."
            ),
            "--train.mixed_precision fp16": "train.mixed_precision: fp16 ... allowed: no, bf16.",
            "--model.init_from ~nobody_here/x": "model.init_from: there is no model ~nobody_here/x",
            "--tokenizer.kind pretrained --tokenizer.name_or_path ~nobody_here/x": "~nobody_here/x",
            "--distill_from ~nobody_here/x": "~nobody_here/x",
        },
    ),
    "verify_resume": (
        OF_A_CONFIG,
        {
            "--steps 4": "--steps: 4 is out of range; allowed: more than --kills 4.",
            "--step 9": "unknown key step",
            "--folder out": "--resume, --folder and --pattern describe another trainer; add its --command.",
            "--faults SIGHUP": "--faults: invalid choice: 'SIGHUP'",
            "--command python": "not with --command; add it to the command itself.",
            "--command python --steps 9": "--steps: not with --command; add it to the command itself.",
        },
    ),
    "vocabulary_study.py": (
        "",
        {
            "--files none.txt": "none.txt (No such file or directory); name a text file.",
            "--files .": "(Is a directory); name a text file.",
            "--files text.txt empty.txt": "empty.txt is empty; leave it out, or fill it with text.",
            "--files text.txt latin.txt": "latin.txt is not UTF-8 (byte 0: invalid start byte); convert it",
            "--files text.txt cut.txt": "cut.txt is not UTF-8 (byte 0: unexpected end of data); convert it",
            "--files cut.txt": "--files: a sample of 2 bytes is too small; allowed: 1,000 or more.",
            "--files text.txt --max_bytes 9": "--files: a sample of 9 bytes is too small",
            "--files text.txt --vocab_size 300": "unknown key vocab_size",
        },
    ),
}


FILES = {
    "text.txt": b"a text\n" * 200,
    "short.txt": b"good text",
    "empty.txt": b"",
    "latin.txt": "\xfcber".encode("latin-1") * 100,
    "cut.txt": "\u4f60".encode()[:2],
    "chat.jsonl": b'{"messages": []}\n',
    "ids.bin": b"\0\1",
    "table.csv": b"stars,body\n5,a text\n",
    "tiny.yaml": b"seeds: [1]\ncommon: {train.max_steps: 1}\narms: {a: {}}\n",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two byte-level GPT-2s of context 16; `small` lacks an entry for the tokenizer's last id."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = find_tokenizer(TokenizerSection(kind="byte"), {}, Path("unused"))
    assert tokenizer is not None
    shape: dict[str, int] = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    for name, vocab_size in (("gpt2", 257), ("small", 256)):
        config = GPT2Config(bos_token_id=0, eos_token_id=0, vocab_size=vocab_size, **shape)
        GPT2LMHeadModel(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(("script", "mistake"), [(script, text) for script in MISTAKES for text in MISTAKES[script][1]])
def test_mistake_in_a_script_call_is_one_line(run_script, tiny_run, tmp_path, models, monkeypatch, script, mistake):
    if "fp16" in mistake and torch.cuda.is_available():
        pytest.skip("fp16 is no mistake on a GPU")
    before, lines = MISTAKES[script]
    folder = tmp_path / "here"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for model in models.iterdir():
        (folder / model.name).symlink_to(model)
    monkeypatch.chdir(folder)
    options = tiny_run() if before == OF_A_CONFIG else before.split()
    status, printed, error = run_script(script, *options, *mistake.split())
    assert (status, error.count("\n")) == (2, 1) and error.startswith("error: "), printed + error
    assert all(part in error for part in lines[mistake].split("...")), error
    assert {path.name for path in folder.rglob("*") if path.is_file()} == FILES.keys()
    assert not list((tmp_path / "runs").rglob("config.yaml")), "a run was started"


def test_argparse_errors_are_one_line(run_script):
    for arguments in (["generate"], ["evaluate", "--model"], ["doctor", "--jsonn", "x"]):
        status, printed, error = run_script(*arguments)
        assert (status, printed, error.count("\n")) == (2, "", 1) and error.startswith("error: "), error


OUTPUTS = {  # script: its arguments, the option, and what must not be reached
    "compare": (["run"], "--output_dir", "hfgolf.compare.outcome.read_outcome"),
    "evaluate": (["--model=m", "--files=f"], "--certificate", "hfgolf.commands.evaluate_text.evaluate_text"),
    "export": (["run"], "--output", "hfgolf.commands.export.export_checkpoint"),
    "find_lr": (["--train.max_steps=1"], "--output", "hfgolf.commands.lr_sweep.find_lr"),
    "ladder.py": (["--train.max_steps=1"], "--output", "hfgolf.commands.scratch.scratch_run"),
    "report": (["run"], "--output", "hfgolf.run.record.read_run"),
    "profile": (["--train.max_steps=1"], "--output", "hfgolf.commands.scratch.scratch_run"),
    "roofline.py": ([], "--output", "hfgolf.commands.scratch.scratch_run"),
    "schedule": (["--train.max_steps=1"], "--output", "hfgolf.optim.schedule.apply_schedule"),
    "vocabulary_study.py": (["--files", "text.txt"], "--output", "hfgolf.data.pieces.PieceWriter"),
}
SUFFIXES = {"evaluate": ".json", "find_lr": ".png", "report": ".html", "schedule": ".svg"}


@pytest.mark.parametrize("script", OUTPUTS)
def test_unwritable_output_is_one_line_before_any_work(run_script, tmp_path, monkeypatch, script):
    def reached(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"{script} began to work")

    arguments, option, work = OUTPUTS[script]
    module, _, name = work.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, reached)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").touch()
    for folder, reason in (("file/deeper", "Not a directory"), ("/proc/nowhere", "No such file or directory")):
        status, printed, error = run_script(script, *arguments, option, f"{folder}/out{SUFFIXES.get(script, '')}")
        assert (status, printed, error.count("\n")) == (2, "", 1), error
        assert error.startswith(f"error: {option}: cannot write to {folder}") or script in SUFFIXES, error
        assert f"({reason}); choose another folder." in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_report_output_needs_the_name_of_a_page(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    for arguments, message in (
        (["--output", "page.pdf"], "--output: page.pdf can't be written; allowed: a name that ends in .html."),
        (["--output", "folder.html"], "--output: folder.html is a folder; name a file."),
    ):
        assert run_script("report", "run", *arguments) == (2, "", f"error: {message}\n")
