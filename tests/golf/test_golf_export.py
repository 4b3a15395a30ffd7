"""From a run to files of a stated size: what it writes, and what makes it exit with 1."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import shutil
import zlib

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_golf import decode
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from hfgolf import train
from hfgolf.config.parse import load_config
from hfgolf.golf.decoder import MAGIC, VERSION, read_sections
from hfgolf.golf.export import Settings, export
from hfgolf.golf.ledger import rescore
from hfgolf.golf.merges import unpack_tokenizer
from hfgolf.golf.script import MAX_BYTES
from hfgolf.golf.source import run_source
from hfgolf.golf.unpack import state_sha256, unpack
from hfgolf.publish.hub import exported_files
from hfgolf.system.errors import UserError

pytestmark = pytest.mark.slow
BUDGET = 22_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_run_in):
    """Return the folder of a run of a few steps: 33,000 weights in matrices, a byte tokenizer."""
    folder, ends = tmp_path_factory.mktemp("trained"), {"train__max_steps": 30, "train__eval_every_steps": 30}
    ends |= {"train__save_every_steps": 30, "golf__calibration_tokens": 512}
    train(load_config(tiny_run_in(folder, **ends, model__induction_heads=0)))  # as in the golf configs
    return folder / "runs" / "tiny"


@pytest.fixture(scope="module")
def exported(trained):
    """Return a folder with an export."""
    source = run_source(trained)
    settings = Settings(source.golf.replace(budget_bytes=BUDGET))
    assert export(source, settings, trained / "golf").problems == []
    return trained / "golf"


def test_export_fits_and_its_ledger_lists_the_files_on_disk(exported):
    ledger = json.loads((exported / "ledger.json").read_text())
    sizes = {path.name: path.stat().st_size for path in exported.iterdir() if path.is_file()}
    assert {file["name"]: file["bytes"] for file in ledger["files"]}.items() <= sizes.items()
    assert 0.98 * BUDGET <= ledger["totals"]["challenge"] <= BUDGET
    assert ledger["totals"]["challenge"] == sizes["artifact.bin"] + sizes["score.py"]
    others = sizes["tokenizer.json.xz"] + sizes["config.yaml.xz"]
    assert ledger["totals"]["everything"] == ledger["totals"]["challenge"] + others
    assert ledger["after"]["tokens"] == ledger["before"]["tokens"]
    assert 0 < ledger["after"]["bpb"] - ledger["before"]["bpb"] < 0.5
    table = json.loads((exported / "table.json").read_text())
    matrices = sum(row["bytes"] for row in table["tensors"]) + sum(table["parts"].values())
    assert matrices < sizes["artifact.bin"] < matrices + 500, "and the rest"


def test_exported_model_is_the_one_that_was_scored(exported):
    model = AutoModelForCausalLM.from_pretrained(exported / "model", trust_remote_code=True)
    stored = load_file(exported / "model" / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    _, decoded = decode((exported / "artifact.bin").read_bytes(), order_of(model, shapes))
    for name, tensor in decoded.items():
        np.testing.assert_array_equal(getattr(tensor, "dequantized", lambda tensor=tensor: tensor)(), stored[name])
    tokens = np.fromfile(exported / "tokens.bin", "<u2").astype(np.int64)
    inputs = torch.from_numpy(tokens[:-1][: (len(tokens) - 1) // 32 * 32].reshape(-1, 32))
    labels = torch.from_numpy(tokens[1 : inputs.numel() + 1].reshape(-1, 32))
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    after = json.loads((exported / "ledger.json").read_text())["after"]
    assert after["nats"] / after["tokens"] == pytest.approx(nats.item() / labels.numel(), abs=0.01)


def test_a_run_of_another_architecture_exports_what_unpack_reads(tmp_path, tiny_run_in, hfgolf):
    folder = tmp_path / "runs" / "tiny"
    ends = {"train__max_steps": 20, "train__eval_every_steps": 20, "golf__calibration_tokens": 512}
    train(load_config(tiny_run_in(tmp_path, **ends, model__architecture="llama")))
    assert hfgolf("golf", "export", folder, "--budget_bytes", BUDGET).status == 0
    exported = folder / "golf"
    ledger = json.loads((exported / "ledger.json").read_text())
    sizes = {path.name: path.stat().st_size for path in exported.iterdir() if path.is_file()}
    assert 0.98 * BUDGET <= sizes["artifact.bin"] + sizes["unpack.py"] == ledger["totals"]["challenge"] <= BUDGET
    state = unpack(str(exported / "artifact.bin"))
    assert state_sha256(state) == ledger["weights_sha256"] and ledger["problems"] == []
    model = AutoModelForCausalLM.from_pretrained(exported / "model")
    assert state_sha256(model.state_dict()) == ledger["weights_sha256"]
    said = hfgolf("golf score", exported)
    assert said.status == 2 and "unpack.py, reads the weights but scores nothing; use hfgolf evaluate" in said.err


def order_of(model, shapes):
    return {name: shapes[name] for name in model.state_dict() if name in shapes}


def test_card_states_bytes_and_bits_per_byte(exported):
    card = (exported / "model" / "README.md").read_text()
    ledger = json.loads((exported / "ledger.json").read_text())
    size = (exported / "artifact.bin").stat().st_size
    assert f"an artifact of {size:,} bytes" in card and f"of a budget of {BUDGET:,}" in " ".join(card.split())
    assert f"scores {ledger['after']['bpb']:.4f} bits per byte" in " ".join(card.split())
    assert f"| bits per byte | {ledger['after']['bpb']:.4f} |" in card
    assert f"| perplexity | {np.exp(ledger['after']['nats'] / ledger['after']['tokens']):,.4f} |" in card
    assert ledger["weights_sha256"] in card
    assert f'from_pretrained("{exported / "model"}"' in card
    assert "A sample" not in card, "that of the run is by the weights before rounding"
    assert "model.safetensors" in {path.name for path in exported_files(exported / "model")}, "it can be pushed"


@pytest.fixture
def copied(trained, corpus_file, tmp_path, monkeypatch):
    """Return a copy of the run, with a copy of its text that may change."""
    text = tmp_path / corpus_file.name
    shutil.copy(corpus_file, text)
    folder = tmp_path / "runs" / "tiny"
    shutil.copytree(trained, folder, symlinks=True, ignore=shutil.ignore_patterns("golf"))
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace(str(corpus_file), str(text)))
    return folder


def change_text(folder):
    """Add another document's worth of text: what was training text now validates."""
    (text,) = folder.parents[1].glob("*.txt")
    text.write_text(text.read_text() + text.read_text()[:20_000])


def edit(name, before, after):
    """Return a function that replaces bytes in a file of a run."""
    return lambda folder: (folder / name).write_bytes(re.sub(before, after, (folder / name).read_bytes(), count=1))


def forget_text(folder):
    """As in a run of an older version whose checkpoints are gone."""
    shutil.rmtree(folder / "checkpoints")
    metadata = json.loads((folder / "metadata.json").read_text())
    del metadata["corpus"]
    (folder / "metadata.json").write_text(json.dumps(metadata))


def change_text_without_checkpoints(folder):
    shutil.rmtree(folder / "checkpoints")
    change_text(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_text, r"the text is not the one that .*tiny was trained on \(files \(corpus.txt\)"),
        (change_text_without_checkpoints, r"the text is not the one that .*tiny was trained on \(files \(corpus.txt\)"),
        (
            edit("config.yaml", rb"val_fraction: 0.1\b", b"val_fraction: 0.2"),
            r"the text is not the one that .*tiny was trained on \(val_fraction \(0.1 -> 0.2\)\)",
        ),
        (
            edit("config.yaml", rb"adamw_learning_rate: 0.01\b", b"adamw_learning_rate: 0.02"),
            r"is not the config that trained the run \(optim.adamw_learning_rate 0.01 -> 0.02\)",
        ),
        (
            edit("model/model.safetensors", rb"(?s).\Z", b"!"),
            "model/model.safetensors does not match its sha256, so this is not what .*tiny trained",
        ),
        (
            edit("model/tokenizer.json", rb"\Z", b" "),
            r"model/tokenizer.json has \d+ bytes instead of \d+, so this is not what",
        ),
        (forget_text, "has no checkpoint left that says which text it was trained on"),
    ],
)
def test_an_export_of_a_run_is_about_what_the_run_recorded(copied, change, message):
    run_source(copied)
    change(copied)
    with pytest.raises(UserError, match=f"^--run: .*{message}"):
        run_source(copied)


def test_scaled_rope_is_refused_because_score_py_has_none(trained, tmp_path):
    source = run_source(trained)
    source.model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UserError, match=r"scores only plain RoPE, .* rope_parameters \{'rope_type': 'linear'"):
        export(source, Settings(source.golf), tmp_path / "out")


def test_training_text_that_is_not_all_of_it_is_not_searched_for_duplicates(copied):
    assert run_source(copied).train_split == "training"
    with (copied / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 10, "event": "resumed", "elapsed_seconds": 1.0, "changed": ["files"], "begins_data": true}\n'
        )
    assert run_source(copied).train_split is None


def forge(folder, name, content):
    """Replace a file of an export, and its entry of the ledger."""
    (folder / name).write_bytes(content)
    ledger = json.loads((folder / "ledger.json").read_text())
    for entry in ledger["files"]:
        if entry["name"] == name:
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "ledger.json").write_text(json.dumps(ledger))


def forge_ledger(change):
    """Return a function that changes the ledger of a folder."""

    def forge_(folder):
        ledger = json.loads((folder / "ledger.json").read_text())
        change(ledger)
        (folder / "ledger.json").write_text(json.dumps(ledger))

    return forge_


def forge_artifact(section, content):
    """Return a function that replaces a section of the artifact, with a right CRC."""

    def forge_(folder):
        sections = read_sections((folder / "artifact.bin").read_bytes())
        sections[section] = content
        data = MAGIC + VERSION.to_bytes(2, "little")
        data += b"".join(len(one).to_bytes(4, "little") + one for one in sections)
        forge(folder, "artifact.bin", data + zlib.crc32(data).to_bytes(4, "little"))

    return forge_


def forge_program(folder):
    ran = json.dumps(str(folder / "ran"))
    forge(folder, "score.py", f'open({ran}, "w")\nprint(\'{{"nats": 1.0, "bpb": 0.0002}}\')\n'.encode())


def forge_text(folder):
    tokens = np.fromfile(folder / "tokens.bin", "<u2")
    tokens[5:] = tokens[5]  # easy to predict
    forge(folder, "tokens.bin", tokens.tobytes())


def forge_bytes(folder):
    token_bytes = np.fromfile(folder / "bytes.bin", "<u2")
    forge(folder, "bytes.bin", (token_bytes * 9).astype("<u2").tobytes())


def spoil(name, change):
    """Return a function that changes a file of a folder, but not its entry of the ledger."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def replace_by_a_link(name):
    """Return a function that moves a file to a folder beside it, and links to it."""

    def replace(folder):
        (folder / name).rename(folder / "model" / name)
        (folder / name).symlink_to(folder / "model" / name)

    return replace


def replace_by_a_pipe(name):
    """Return a function that makes a file one whose read never ends."""

    def replace(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


def entry_of(ledger, name):
    return next(entry for entry in ledger["files"] if entry["name"] == name)


raise_budget = forge_ledger(lambda told: told.update(budget_bytes=10**9))
BROKEN = "ledger.json is missing or broken; name a folder that `hfgolf golf export` wrote."

NO_PLAIN_FILE = (
    "is a link, a pipe, a socket or a device, which no export writes; name a folder that `hfgolf golf export` wrote."
)
NO_FILE = "a file of ledger.json cannot be read ("


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoil("score.py", lambda data: data + b"#"), "score.py is not the file of the ledger"),
        (forge_ledger(lambda told: told.update(budget_bytes=9999)), "more than the budget of 9,999"),
        (spoil("ledger.json", lambda data: b"{}"), BROKEN),
        (forge_program, "score.py is not the program that this version of hfgolf writes for artifact.bin, so it was"),
        (forge_text, "certificate.json is of another text"),
        (forge_bytes, "bytes.bin: a token stands for more bytes than tokenizer.json.xz spells."),
        (replace_by_a_link("bytes.bin"), f"bytes.bin {NO_PLAIN_FILE}"),
        (replace_by_a_pipe("ledger.json"), f"ledger.json {NO_PLAIN_FILE}"),
        (lambda folder: (folder / "certificate.json").unlink(), "certificate.json is of another text"),
        (
            lambda folder: forge(folder, "tokenizer.json.xz", b"xz"),
            "tokenizer.json.xz, tokens.bin and bytes.bin do not",
        ),
        (forge_artifact(0, b'{"hidden_sise": 9}'), "artifact.bin: it is damaged: its config has unknown fields."),
        (lambda folder: (forge_artifact(0, b"[" * 5_000)(folder), raise_budget(folder)), "artifact.bin: "),
        (forge_artifact(0, b'{"num_hidden_layers": 1000000000}'), "artifact.bin: num_hidden_layers: 1000000000 is not"),
        (forge_artifact(0, b'{"hidden_size":1048576,"num_attention_heads":1024}'), "artifact.bin: its weights would"),
        (forge_artifact(0, b'{"vocab_size":9223372036854775808}'), "artifact.bin: its weights would take "),
        (forge_artifact(1, zlib.compress(np.array([1, 1, 0, 0, -2], "<i2").tobytes())), "score.py gave no score: "),
        (forge_artifact(2, b"odd"), "score.py gave no score: "),
        (forge_ledger(lambda told: entry_of(told, "bytes.bin").update(name="../../etc/passwd")), BROKEN),
        (forge_ledger(lambda told: told["files"].append(told["files"][0] | {"name": "../x"})), BROKEN),
        (forge_ledger(lambda told: told["files"].append(told["files"][0] | {"name": "a\0"})), NO_FILE),
        (forge_ledger(lambda told: told["files"].append(told["files"][0] | {"name": 300 * "a"})), NO_FILE),
        (forge_ledger(lambda told: entry_of(told, "artifact.bin").update(counted_by=[])), BROKEN),
        (forge_ledger(lambda told: told["files"].remove(entry_of(told, "artifact.bin"))), BROKEN),
        (forge_ledger(lambda told: told["files"].append(told["files"][0])), BROKEN),
        (forge_ledger(lambda told: told.update(count="nothing")), BROKEN),
        (forge_ledger(lambda told: told.update(budget_bytes="22000")), BROKEN),
        (forge_ledger(lambda told: told["settings"].update(evaluation="-c")), BROKEN),
        (forge_ledger(lambda told: told["settings"].update(adapt_rate="1")), BROKEN),
        (forge_ledger(lambda told: told["settings"].update(adapt_rate=2)), BROKEN),
        (forge_ledger(lambda told: told["settings"].update(stride="1")), BROKEN),
        (forge_ledger(lambda told: told["after"].update(nats="low")), BROKEN),
        (forge_ledger(lambda told: told.update(files={})), BROKEN),
        (forge_ledger(lambda told: told.update(after=[])), BROKEN),
    ],
)
def test_golf_score_believes_nothing_of_a_folder(exported, hfgolf, tmp_path, change, said):
    folder = tmp_path / "golf"
    shutil.copytree(exported, folder)
    change(folder)
    ended = hfgolf("golf score", folder)
    assert ended.status in (1, 2) and ended.out == ""
    assert said in ended.err and ended.err.count("\n") == 1
    assert not (folder / "ran").exists(), "nothing foreign is executed"


def test_a_score_that_is_not_the_ledgers_is_a_problem(exported, hfgolf, tmp_path):
    folder = tmp_path / "golf"
    shutil.copytree(exported, folder)
    names = ("nats", "tokens", "bytes", "bpb")
    forge_ledger(lambda told: told["after"].update({name: told["after"][name] * 2 for name in names}))(folder)
    ended = hfgolf("golf score", folder)
    assert ended.status == 1
    for name, line in zip(names, ended.err.splitlines(), strict=True):
        assert f" {name}, but the ledger states " in line


def test_a_config_that_is_not_counted_is_told(exported, hfgolf, tmp_path):
    folder = tmp_path / "golf"
    shutil.copytree(exported, folder)
    forge_ledger(lambda told: told["files"].remove(entry_of(told, "config.yaml.xz")))(folder)
    ended = hfgolf("golf score", folder)
    assert (ended.status, ended.err) == (0, "")
    assert "counting everything; the config that trains it is not there, so not counted)" in ended.out


@pytest.fixture
def raw_text(exported, corpus_file, tmp_path):
    """Return a file with the text that was scored: the end of the corpus."""
    num_bytes = json.loads((exported / "certificate.json").read_text())["num_bytes"]
    path = tmp_path / "raw.txt"
    path.write_bytes(corpus_file.read_bytes()[-num_bytes:])
    return path


def forge_text_of(folder, raw, tokens, token_bytes, tokenizer=None):
    """Make everything in a folder but the score agree with other tokens and bytes, certificate too."""
    forge(folder, "tokens.bin", tokens.astype("<u2").tobytes())
    forge(folder, "bytes.bin", token_bytes.astype("<u2").tobytes())
    sha256, num_bytes = hashlib.sha256(raw).hexdigest(), int(token_bytes.sum())
    changed = {"num_tokens": len(tokens), "num_bytes": num_bytes, "sha256": sha256, "documents": [[sha256, num_bytes]]}
    if tokenizer is not None:
        forge(folder, "tokenizer.json.xz", lzma.compress(tokenizer.to_str().encode()))
        changed["tokenizer_sha256"] = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    certificate = json.loads((folder / "certificate.json").read_text()) | changed
    (folder / "certificate.json").write_text(json.dumps(certificate))


def leave_out_text(folder, raw):
    """The second half of the text, which is harder, say."""
    tokens, token_bytes = (np.fromfile(folder / name, "<u2")[:1001] for name in ("tokens.bin", "bytes.bin"))
    forge_text_of(folder, raw[:1000], tokens, token_bytes)


def double_bytes(folder, raw):
    """Each byte that was scored is spelled twice by the tokenizer."""
    rules = json.loads(unpack_tokenizer((folder / "tokenizer.json.xz").read_bytes()).to_str())
    rules["model"]["vocab"] = {entry * (1 + (len(entry) == 1)): n for entry, n in rules["model"]["vocab"].items()}
    doubled = Tokenizer.from_str(json.dumps(rules))
    tokens, token_bytes = (np.fromfile(folder / name, "<u2") for name in ("tokens.bin", "bytes.bin"))
    text = doubled.decode(tokens[1:].tolist(), skip_special_tokens=False).encode()
    forge_text_of(folder, text, tokens, token_bytes * 2, doubled)


def keep_the_certificate(folder, raw):
    """Tokens that are easier to predict, of as many bytes, under the certificate of the text itself."""
    tokens = np.fromfile(folder / "tokens.bin", "<u2")
    tokens[1:] = tokens[1]
    forge(folder, "tokens.bin", tokens.tobytes())


def test_golf_score_compares_with_the_raw_text(exported, hfgolf, raw_text):
    alone, compared = (hfgolf("golf score", exported, *files) for files in ((), ("--files", raw_text)))
    assert (alone.status, alone.err, compared.status, compared.err) == (0, "", 0, "")
    sha256 = f"sha256 {json.loads((exported / 'certificate.json').read_text())['sha256'][:16]}"
    assert f"text           {sha256}, the folder's own word" in alone.out
    assert f"text           that of --files, {sha256}\n" in compared.out
    assert compared.out.splitlines()[-1] == alone.out.splitlines()[-1], "the same score"
    totals = json.loads((exported / "ledger.json").read_text())["totals"]
    challenge, everything = f"{totals['challenge']:,}", f"{totals['everything']:,}"
    assert f"bytes          {challenge} of {BUDGET:,} ({everything} counting everything)\n" in alone.out
    flat = hfgolf("golf score", exported, "--stride", 16)
    assert flat.status == 2 and "error: --stride needs --evaluation sliding or documents, but it is flat." in flat.err
    missing = hfgolf("golf score", exported, "--files", raw_text.with_name("other.txt"))
    assert (missing.status, missing.out) == (2, "") and missing.err.startswith("error: --files: ")


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (leave_out_text, "certificate.json is of another text: of "),
        (double_bytes, "--files: No certificate: "),
        (keep_the_certificate, "is not what tokenizer.json.xz makes of "),
    ],
)
def test_a_folder_that_agrees_with_itself_is_refused_beside_the_raw_text(
    exported, hfgolf, tmp_path, raw_text, doctor, said
):
    folder = tmp_path / "golf"
    shutil.copytree(exported, folder)
    doctor(folder, raw_text.read_bytes())
    ended = hfgolf("golf score", folder, "--files", raw_text)
    assert (ended.status, ended.out) == (1, "") and ended.err.count("\n") == 1 and said in ended.err
    if doctor is leave_out_text:
        forge_ledger(lambda told: told.update(after=rescore(folder)))(folder)
        alone = hfgolf("golf score", folder)
        assert alone.status == 0 and "the folder's own word" in alone.out


def test_command_line_overrides_the_export_settings_of_the_run(trained, tmp_path, hfgolf):
    output = tmp_path / "small"
    options = ["--output", output, "--budget_bytes", "60000", "--count", "everything", "--method", "nearest"]
    options += ["--evaluation", "sliding", "--stride", "16", "--adapt_rate", "1e-3", "--skip_before"]
    ended = hfgolf("golf export", "--run", trained, *options)
    assert ended.status == 0, ended.err
    windows = "sliding, stride 16, adapting at a rate of 0.001"
    for line in ("Certificate holds", "bits per byte", windows, "SDClip", "artifact.bin"):
        assert line in ended.out
    assert re.search(r"coding 1: D .*bytes", ended.err), "progress"
    ledger = json.loads((output / "ledger.json").read_text())
    assert ledger["totals"]["everything"] <= 60_000 < 60_000 + MAX_BYTES
    assert ledger["before"] is None and "score before" not in ended.err and "before" not in ended.out
    assert "before rounding" not in (output / "model" / "README.md").read_text()
    assert ledger["settings"]["method"] == "nearest" and ledger["settings"]["calibration_tokens"] == 512
    again = hfgolf("golf score", output)
    assert again.status == 0 and f"{ledger['after']['bpb']:.4f}" in again.out, "by the ledger's settings"
    plain = hfgolf("golf score", output, "--adapt_rate", 0, "--json")
    assert json.loads(plain.out)["bpb"] != pytest.approx(ledger["after"]["bpb"], rel=1e-4)
    flat = json.loads(hfgolf("golf score", output, "--evaluation", "flat", "--adapt_rate", 0, "--json").out)
    assert (flat["mode"], flat["tokens"]) == ("flat", ledger["after"]["tokens"])
    assert flat["bpb"] > ledger["after"]["bpb"] + 0.001, "other windows, another score"
    card = (output / "model" / "README.md").read_text()
    assert f"| bits per byte | {flat['bpb']:.4f} |" in card, "of the model as anybody loads it"
    assert f"scores {ledger['after']['bpb']:.4f} bits per byte" in card and "test-time training" in card


def test_any_golf_model_can_be_exported_also_if_its_tokenizer_begins_each_text_with_a_token(
    trained, corpus_file, tmp_path, hfgolf
):
    """Also if its config names other ends of text, as that of a model that chats."""
    shutil.copytree(trained / "model", tmp_path / "model")
    edit("config.json", rb'"eos_token_id": \d+', b'"eos_token_id": [256, 5]')(tmp_path / "model")
    rules = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    entry = next(entry for entry, number in rules["model"]["vocab"].items() if number == 1)
    begins = {"SpecialToken": {"id": entry, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {entry: {"id": entry, "ids": [1], "tokens": [entry]}}
    rules["post_processor"] = {
        "type": "TemplateProcessing",
        "single": begins,
        "pair": begins,
        "special_tokens": special,
    }
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(rules))
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for text in texts:
        text.write_text(f"{text.stem} and seven make thirteen. Na\u00efve.\n" * 9, encoding="utf-8")
    options = ["--files", *texts, "--calibration_files", corpus_file, "--budget_bytes", BUDGET, "--json"]
    options += ["--evaluation", "documents", "--stride", "16"]
    ended = hfgolf("golf export", "--model", tmp_path / "model", "--output", tmp_path / "out", *options)
    assert ended.status == 0, ended.err
    printed = json.loads(ended.out)
    assert printed["ledger"]["after"]["bytes"] == sum(text.stat().st_size for text in texts)
    assert printed["problems"] == [] and "2 documents, " in printed["certificate"]
    assert "none of them among 1 calibration document;" in printed["certificate"]
    assert "## How small it is" in (tmp_path / "out" / "model" / "README.md").read_text()
    assert np.fromfile(tmp_path / "out" / "tokens.bin", "<u2")[1] == 1
    assert hfgolf("golf score", tmp_path / "out", "--files", *texts).status == 0
    other_order = hfgolf("golf score", tmp_path / "out", "--files", *reversed(texts))
    assert "2 of its 2 documents are in it" in other_order.err


def test_failed_certificate_gives_no_score(trained, corpus_file, tmp_path, hfgolf):
    """The validation text is also the calibration text."""
    copy = tmp_path / "copy.txt"
    shutil.copyfile(corpus_file, copy)
    options = ["--model", trained / "model", "--output", tmp_path / "out", "--budget_bytes", BUDGET]
    ended = hfgolf("golf export", *options, "--files", copy, "--calibration_files", corpus_file)
    assert ended.status == 1
    assert "No certificate: 1 of 1 validation documents are also calibration documents" in ended.err
    assert "bits per byte" not in ended.out
    assert not (tmp_path / "out" / "artifact.bin").exists()
    assert json.loads((tmp_path / "out" / "certificate.json").read_text())["holds"] is False


@pytest.mark.parametrize(
    "options, said",
    [
        (["--run", "nowhere"], "there is no run in nowhere"),
        (["--model", "m", "--budget_bytes", "1"], "also give --files, --calibration_files and --output"),
        (["--run", "RUN"], "--budget_bytes is missing"),
        (["--run", "RUN", "--text_column", "body"], "--text_column: a run brings its own text"),
        (["--run", "RUN", "--budget_bytes", "7000"], "7,000 is too small"),
        (["--run", "RUN", "--output", "RUN", "--budget_bytes", "9000"], "exists and no export wrote it"),
        (["--run", "RUN", "--code_files", "nothing.py"], "nothing.py is not a file"),
        (
            ["--run", "RUN", "--code_files", "one/a.py", "two/a.py"],
            "two/a.py is not a file, is hidden, or has the name",
        ),
        (["--run", "RUN", "--code_files", "one/certificate.json"], "has the name of another file of the export"),
        (["--run", "RUN", "--code_files", "one/.a.py"], ".a.py is not a file, is hidden, or"),
        (
            ["--model", "RUN", "--files", "one/a.py", "--calibration_files", "two/a.py", "--output", "out"],
            "--calibration_files: they have 10 tokens, but a sequence of this model takes 32 and the one after",
        ),
    ],
)
def test_export_mistakes_are_one_line(trained, run_script, options, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("one/a.py", "two/a.py", "one/certificate.json", "one/.a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("print(1)\n")
    ended = run_script("golf_export.py", *(trained if option == "RUN" else option for option in options))
    last = ended.err.strip().splitlines()[-1]
    assert ended.status == 2 and last.startswith("error: ") and said in last
    assert not list(trained.glob(".partial*")), "what an export began is not left behind"
