"""GGUF files in llama.cpp: the same logits, the same greedy tokens, the same ids for a text: `make test-ecosystem`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_export import ROOT, build_tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfgolf.config.sections import TokenizerSection
from hfgolf.data.chat import add_chat_template
from hfgolf.data.tokenizer import END_OF_TEXT, build_tokenizer
from hfgolf.model.configuration_golf import GolfConfig
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.publish.convert import convert_folder
from hfgolf.publish.export import export_model
from hfgolf.publish.gguf import export_gguf
from hfgolf.system.errors import UserError

gguf = pytest.importorskip("gguf", reason="gguf is not installed; run make test-ecosystem")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; run make test-ecosystem")
pytestmark = [pytest.mark.ecosystem, pytest.mark.slow]

LLAMA = {"activation": "swiglu", "qk_norm": False}
MODELS: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Apertus, tied": {"embedding_norm": False},
    "Apertus, no positions": {"position_embedding": "none"},
    "Qwen3": {"activation": "swiglu"},
    "Qwen3, tied": {"activation": "swiglu", "embedding_norm": False},
    "Llama, one key head": LLAMA | {"num_key_value_heads": 1},
    "Llama, biases": LLAMA | {"use_bias": True},
    "Arcee": {"qk_norm": False},
}
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ODD = "naïve café — 日本語 👍🏽 don't I'LL we'Ve 12345 ½ ١٢٣ \t\n\n  trailing   \u00a0nbsp\u3000 x\r\n\r\n  y  \n z\n"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8") + ODD
RANGES = [(1, 128), (128, 0x800), (0x800, 0x2581), (0x2582, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Any]:
    llama = llama_cpp.Llama(str(path), verbose=False, n_threads=1, n_threads_batch=1, **options)
    try:
        yield llama
    finally:
        llama.close()


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's kernels for AMX crash on some virtual machines, also on files that it wrote itself."""
    default = llama_cpp.llama_cpp.llama_model_default_params

    def plain() -> Any:
        parameters = default()
        parameters.use_extra_bufts = False
        return parameters

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", plain)


@pytest.mark.parametrize("quantization, tolerance", [("f32", 1e-3), ("f16", 2e-3)])  # llama.cpp caches keys in f16
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_has_the_same_logits_and_greedy_tokens(tmp_path, name, quantization, tolerance):
    model, tokenizer = build_tiny(**MODELS[name])
    export_model(model, tokenizer, tmp_path / "golf", "# A card")
    said = export_gguf(str(tmp_path / "golf"), tmp_path / "a.gguf", quantization)
    assert said.startswith(name.partition(",")[0]) and f"; {quantization}, " in said
    with opened(tmp_path / "a.gguf", n_ctx=32, logits_all=True) as llama:
        ids = llama.tokenize("naïve Köln".encode())
        assert ids == [tokenizer.eos_token_id, *"naïve Köln".encode()]
        prompt = torch.tensor([ids])
        with torch.no_grad():
            expected = model(prompt).logits[0]
            greedy = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
        llama.eval(ids)
        assert np.abs(llama.scores[: len(ids)] - expected.numpy()).max() < tolerance
        written = llama.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0)
        assert [next(written) for _ in range(12)] == greedy[0, len(ids) :].tolist()


def test_a_native_folder_gives_the_file_of_its_golf_model(tmp_path):
    export_model(*build_tiny(), tmp_path / "golf", "# A card")
    convert_folder(str(tmp_path / "golf"), tmp_path / "native", "native")
    for folder in ("golf", "native"):
        export_gguf(str(tmp_path / folder), tmp_path / folder / "a.gguf", "f16")
    golf, native = ((tmp_path / folder / "a.gguf").read_bytes() for folder in ("golf", "native"))
    assert golf == native


def test_q8_0_is_what_llama_cpp_itself_makes_of_f32(tmp_path):
    export_model(*build_tiny(hidden_size=64), tmp_path / "golf", "# A card")
    for quantization in ("f32", "q8_0"):
        export_gguf(str(tmp_path / "golf"), tmp_path / f"{quantization}.gguf", quantization)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    paths = (str(tmp_path / name).encode() for name in ("f32.gguf", "theirs.gguf"))
    assert llama_cpp.llama_model_quantize(*paths, settings) == 0
    theirs, ours = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / name).tensors}
        for name in ("theirs.gguf", "q8_0.gguf")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.tensor_type == theirs[name].tensor_type
        assert np.array_equal(tensor.data, theirs[name].data), name
    with opened(tmp_path / "q8_0.gguf", n_ctx=32) as llama:
        llama.eval([256, 97])


def trained(kind: str, folder: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer of hfgolf's, or one with the pre-tokenizer of another model."""
    if kind in ("byte", "char", "bpe"):
        config = TokenizerSection(kind=kind, vocab_size=600)
        return build_tokenizer(config, {}, lambda: Dataset.from_dict({"text": [TEXT]}), folder)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "SmolLM")
    first: Any = pre_tokenizers.Digits(individual_digits=True)
    if kind != "SmolLM":
        digits = r"\p{N}{1,3}" if kind == "Llama 3" else r"\p{N}"
        first = pre_tokenizers.Split(Regex(f"{CONTRACTIONS}{digits}{REST}"), "isolated")
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "Llama 3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, split])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "SmolLM", "Llama 3", "Qwen2"])
def test_llama_cpp_reads_and_writes_the_same_ids(tmp_path, kind):
    """On a page of text, its pieces, random characters and a spelled end of text; the model has unused rows."""
    tokenizer = trained(kind, tmp_path)
    eos = tokenizer.eos_token_id
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    config = GolfConfig(vocab_size=len(tokenizer) + 7, bos_token_id=eos, eos_token_id=eos, pad_token_id=eos, **shape)
    export_model(GolfForCausalLM(config), tokenizer, tmp_path / "golf", "# A card")
    export_gguf(str(tmp_path / "golf"), tmp_path / "a.gguf", "f32")
    exported = AutoTokenizer.from_pretrained(tmp_path / "golf")
    rng = random.Random(0)
    characters = ["".join(chr(rng.randrange(*rng.choice(RANGES))) for _ in range(100)) for _ in range(100)]
    pieces = [TEXT[start : start + rng.randrange(60)] for start in range(0, len(TEXT), 97)]
    with opened(tmp_path / "a.gguf", vocab_only=True) as llama:
        for text in [TEXT, *pieces, *characters, f"a{END_OF_TEXT}b", " ", "  a "]:
            ids = exported(text)["input_ids"]
            assert llama.tokenize(text.encode(), special=True) == [eos, *ids]
            assert llama.detokenize(ids, special=True).decode() == exported.decode(ids)
        assert llama.token_eos() == llama.token_bos() == eos


def test_a_conversation_has_the_same_ids_and_ends_at_the_end_of_a_turn(tmp_path):
    tokenizer = trained("bpe", tmp_path)
    add_chat_template(tokenizer)
    eos = tokenizer.eos_token_id
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    config = GolfConfig(vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos, pad_token_id=eos, **shape)
    export_model(GolfForCausalLM(config), tokenizer, tmp_path / "golf", "# A card")
    export_gguf(str(tmp_path / "golf"), tmp_path / "a.gguf", "f32")
    messages = [{"role": "user", "content": " What?\n"}, {"role": "assistant", "content": "That."}]
    messages += [{"role": "user", "content": "Which?"}]
    with opened(tmp_path / "a.gguf", vocab_only=True) as llama:
        formatter = llama_cpp.llama_chat_format.Jinja2ChatFormatter(
            llama.metadata["tokenizer.chat_template"], eos_token=END_OF_TEXT, bos_token=END_OF_TEXT
        )
        prompt = formatter(messages=messages).prompt
        exported = AutoTokenizer.from_pretrained(tmp_path / "golf")
        ids = exported.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert llama.tokenize(prompt.encode(), add_bos=False, special=True) == ids
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        assert int(llama.metadata["tokenizer.ggml.eot_token_id"]) == end
        vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
        assert llama_cpp.llama_vocab_is_eog(vocabulary, end) and llama_cpp.llama_vocab_is_eog(vocabulary, eos)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"activation": "gelu"}, "--to gguf: llama.cpp has no apertus with hidden_act gelu."),
        ({"qk_norm": False, "use_bias": True}, "--to gguf: llama.cpp has no arcee with biases."),
        (
            {"norm": "layernorm", "qk_norm": False},
            "--to gguf: hfgolf writes only apertus, qwen3, arcee and llama; this model is Starcoder2ForCausalLM.",
        ),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(tmp_path, options, message):
    export_model(*build_tiny(**options), tmp_path / "golf", "# A card")
    with pytest.raises(UserError) as error:
        export_gguf(str(tmp_path / "golf"), tmp_path / "a.gguf", "f16")
    assert str(error.value) == message and [path.name for path in tmp_path.iterdir()] == ["golf"]


def test_weights_beyond_f16_are_refused(tmp_path):
    model, tokenizer = build_tiny()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    export_model(model, tokenizer, tmp_path / "golf", "# A card")
    with pytest.raises(UserError, match=r"blk.0.ffn_up.weight holds 1e\+06, beyond 65504; use f32"):
        export_gguf(str(tmp_path / "golf"), tmp_path / "a.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["golf"]
