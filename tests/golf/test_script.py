"""score.py: small, and the same model as GolfForCausalLM."""

from __future__ import annotations

import ast
import base64
import importlib
import importlib.metadata
import json
import lzma
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_golf import MODELS, build_model, encode_model

from hfgolf.config.parse import load_config
from hfgolf.golf import program, script
from hfgolf.golf.ledger import ARTIFACT, TOKEN_BYTES, TOKENS, rescore
from hfgolf.golf.script import MAX_BYTES, config_differences, packed_script
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.system.errors import UserError

ROOT = Path(__file__).parents[2]
DEFAULTS = {**script.defaults(), "dropout": 0.0, "attention_dropout": 0.0}  # dropped from a packed program


def unpack(packed: bytes) -> str:
    return lzma.decompress(base64.b85decode(packed.split(b'"')[1])).decode()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if name in ("default", "record") else pytest.mark.slow)
        for name, changes in MODELS.items()
    ],
)
def test_script_logits_match_the_model(changes):
    """Of the program that is packed for this model, whose every vector has random weights."""
    model = build_model(**changes)
    data = encode_model(model)
    program = {"__name__": "score"}
    exec(compile(unpack(packed_script(model.config)), "score.py", "exec", dont_inherit=True), program)
    ids = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))
    _, network, _ = program["load_model"](data, {})
    with torch.no_grad():
        torch.testing.assert_close(network(ids), model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_script_is_small_plain_text_and_needs_only_torch_and_numpy(changes):
    config = build_model(**changes).config
    packed = packed_script(config)
    fields = json.loads(json.dumps(config_differences(config)))
    assert packed_script(GolfConfig(**fields)) == packed, "the artifact says which program scores it"
    assert len(packed) <= MAX_BYTES == 12_000
    assert re.fullmatch(rb"import lzma,base64\nexec\(lzma\.decompress\(base64\.b85decode\(\"[!-~]+\"\)\)\)\n", packed)
    source = unpack(packed)
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert outside == {"torch", "numpy"}
    assert '"""' not in source and "->" not in source and "apply_dropout" not in source and "config." not in source


def test_unused_features_cost_no_bytes():
    small, large = (len(packed_script(build_model(**MODELS[name]).config)) for name in ("default", "record"))
    assert small < large - 400 and small < 8_500


@pytest.mark.slow
def test_script_of_every_shipped_config_fits():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = load_config([f"--config={path}"]).config.model
        fields = {
            name: value for name, value in vars(config).items() if name in script.defaults() and value is not None
        }
        assert len(packed_script(GolfConfig(**fields))) <= MAX_BYTES, path.name


def test_config_differences_keep_only_what_changes_logits():
    config = GolfConfig(hidden_size=64, dropout=0.1, use_cache=False, eos_token_id=3, bos_token_id=3)
    assert config_differences(config) == {
        "hidden_size": 64,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "eos_token_id": 3,
        "bos_token_id": 3,
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["sliding", 4], ["documents", 8]])
def test_script_scores_every_token_once(golf_files, options):
    """The same figures by hand: each token's probability from the logits of the model, window by window."""
    model = build_model()
    encode_model(model)
    tokens = np.fromfile(golf_files / "tokens.bin", "<u2").astype(np.int64)
    token_bytes = np.fromfile(golf_files / "bytes.bin", "<u2")
    if "documents" in options:
        figures = rescore(golf_files, *options)
    else:
        config, network, _ = program.load_model((golf_files / "artifact.bin").read_bytes(), DEFAULTS)
        figures = program.evaluate(network, config, tokens, token_bytes, *options)
    stride = options[-1] if options else 16
    nats = 0.0
    starts = [0, *np.flatnonzero(tokens == 0)[1:]] if "documents" in options else [0]
    for start, end in zip(starts, [*starts[1:], 499], strict=True):
        scored, begin = start, start
        while scored < end:
            last = min(begin + 16, end)
            with torch.no_grad():
                logs = model(torch.from_numpy(tokens[begin:last])[None]).logits[0].double().log_softmax(-1)
            nats -= sum(float(logs[place - begin - 1, tokens[place]]) for place in range(scored + 1, last + 1))
            scored, begin = last, begin + stride
    assert figures["tokens"] == 499 and figures["bytes"] == token_bytes[1:].sum()
    assert figures["nats"] == pytest.approx(nats, rel=1e-6)
    assert figures["bpb"] == pytest.approx(nats / math.log(2) / token_bytes[1:].sum(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("artifact.bin", lambda data: data[:50] + b"X" + data[51:], "it is damaged: its bytes do not match their CRC"),
        ("artifact.bin", lambda data: data[:-1], "it is damaged"),
        ("tokens.bin", lambda data: b"\xff\xff" + data[2:], "tokens and bytes do not belong together"),
        ("bytes.bin", lambda data: data[2:], "tokens and bytes do not belong together"),
    ],
)
def test_damaged_files_are_one_line_and_no_score(golf_files, monkeypatch, capsys, name, spoil, said):
    path = golf_files / name
    path.write_bytes(spoil(path.read_bytes()))
    files = [str(golf_files / file) for file in (ARTIFACT, TOKENS, TOKEN_BYTES)]
    monkeypatch.setattr(sys, "argv", ["score.py", *files])
    with pytest.raises(SystemExit, match=f"^error: .*{said}[^\n]*$"):
        program.main(DEFAULTS)
    assert capsys.readouterr().out == ""


def test_duplicate_names_are_rejected(monkeypatch):
    monkeypatch.setattr(script, "SOURCES", (*script.SOURCES, "golf/program.py"))
    with pytest.raises(ValueError, match=r"two sources of score\.py define"):
        script.assemble({})


@pytest.mark.parametrize("version", [None, "3.3.0"])
def test_a_missing_or_another_minifier_is_one_line(monkeypatch, version):
    if version is None:
        monkeypatch.setitem(sys.modules, "python_minifier", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.delitem(sys.modules, "hfgolf.golf.script")
    needed = r"^Golf needs python-minifier 3\.4\.0; run `pip install python-minifier==3\.4\.0`\.$"
    with pytest.raises(UserError, match=needed):
        importlib.import_module("hfgolf.golf.script")
