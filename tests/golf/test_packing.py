"""Models of any architecture in a stated number of bytes: what comes back without hfgolf is what was evaluated."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, tiny_model
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hfgolf.golf import pack
from hfgolf.golf.curvature import measure_curvature
from hfgolf.golf.packing import StateCoding
from hfgolf.golf.script import packed_unpack
from hfgolf.golf.unpack import state_sha256, unpack
from hfgolf.system.errors import UserError

WIDTH, LENGTH = 32, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        size = x.shape[1]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:size, :size]))
        return x + self.mlp(self.norm2(x))


class OwnGPT(nn.Module):
    """The kind of model that a script has: no config, a buffer of floats, a matrix that no layer has."""

    def __init__(self, is_tied=True, has_head=True):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(Block(), Block())
        self.mix = nn.Parameter(torch.eye(WIDTH) + 0.01 * torch.randn(WIDTH, WIDTH))
        self.register_buffer("angles", 10_000.0 ** -torch.linspace(0, 1, WIDTH) * 1.2345678)
        if has_head:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied and has_head:
            self.head.weight = self.tokens.weight

    def forward(self, ids, targets=None):
        x = self.tokens(ids)
        x += torch.arange(ids.shape[1])[:, None].mul(self.angles).sin()  # in place: the embedding's output is gone
        x = self.blocks(x) @ self.mix
        logits = self.head(x) if hasattr(self, "head") else x @ self.tokens.weight.T
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Detached(nn.Module):
    """A layer whose output no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.layer(x).detach()


def batches(count=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (8, LENGTH), generator=generator) for _ in range(count)]


def with_every_weight_used(model):
    """Also those that begin at zero, such as the output projections of hfgolf's runs."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    return model


MODELS = {
    "llama": lambda: tiny_model("llama", {"tie_word_embeddings": False}),
    "gpt2": lambda: tiny_model("gpt2"),
    "gemma3_text": lambda: tiny_model("gemma3_text"),
    "own": OwnGPT,
    "own, in bf16": lambda: OwnGPT().bfloat16().requires_grad_(False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_comes_back_without_hfgolf_to_the_bit(tmp_path, name):
    torch.manual_seed(0)
    model = with_every_weight_used(MODELS[name]())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    coding = StateCoding(model)
    budget = len(packed_unpack()) + 3000 + sum(tensor.numel() for tensor in coding.tensors.values()) // 2
    packed = pack(model, batches(), budget, tmp_path / "packed")
    sizes = [path.stat().st_size for path in (tmp_path / "packed").iterdir()]
    assert 0.995 * budget <= packed.num_bytes == sum(sizes) <= budget
    assert packed.loss_after == pytest.approx(packed.loss_before, abs=0.5)
    assert packed.kept.keys() == ({"mix"} if "own" in name else set())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), "the model itself is left as it is"
    state = unpack(str(packed.folder / "artifact.bin"))
    assert state_sha256(state) == packed.sha256
    fresh = MODELS[name]()
    fresh.load_state_dict(state, strict=True)
    for key, value in fresh.state_dict().items():
        assert value.dtype == before[key].dtype
        if key not in coding.tensors and key in dict(fresh.named_buffers()):
            assert torch.equal(value, before[key]), "buffers are exact"
    model.load_state_dict(state)
    with torch.no_grad():
        logits = [getattr(out, "logits", out).float() for out in map(fresh.eval(), batches())]
        ids = torch.cat(batches())
        nats = F.cross_entropy(torch.cat(logits)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert nats.item() == pytest.approx(packed.loss_after, rel=1e-4)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Return a model of one's own, and the same model packed."""
    model = with_every_weight_used(OwnGPT())
    return model, pack(model, batches(), 20_000, tmp_path_factory.mktemp("packed"))


def test_unpack_needs_numpy_and_torch_only(own, tmp_path):
    program = (
        "import sys\n"
        "sys.path.insert(0, '.')\n"
        "import torch\n"
        "from unpack import unpack\n"
        "torch.save(unpack('artifact.bin'), sys.argv[1])\n"
        "print(*{'hfgolf', 'transformers'} & {*sys.modules})\n"
    )
    command = [sys.executable, "-I", "-c", program, tmp_path / "state.pt"]
    said = subprocess.run(command, cwd=own[1].folder, capture_output=True, check=True)
    assert said.stdout.strip() == b""
    assert state_sha256(torch.load(tmp_path / "state.pt")) == own[1].sha256


def test_tied_weights_are_stored_once_and_stay_tied(own):
    model, packed = own
    state = unpack(str(packed.folder / "artifact.bin"))
    assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()
    assert packed.num_weights == sum(parameter.numel() for parameter in model.parameters())
    shared = with_every_weight_used(OwnGPT(is_tied=False))
    shared.head.weight = nn.Parameter(shared.tokens.weight.data)  # another parameter in the same memory
    assert "head.weight" not in StateCoding(shared).tensors


def test_what_is_not_on_a_grid_is_tuned_and_the_model_is_left_as_it_is(tmp_path):
    model = with_every_weight_used(tiny_model("gpt2"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    many = pack(model, batches(64), 30_000, tmp_path / "many")
    few = pack(model, batches(64)[:7], 30_000, tmp_path / "few", held_out=batches(64))  # too few to hold one out
    assert many.loss_after < few.loss_after
    assert 0.97 * 30_000 <= many.num_bytes <= 30_000, "tuned integers are smaller, too"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    vectors = {name: value.detach() for name, value in model.named_parameters() if value.ndim < 2}
    for folder, is_tuned in (("many", True), ("few", False)):
        state = unpack(str(tmp_path / folder / "artifact.bin"))
        moved = [not torch.allclose(state[name], value, 2.0**-8, 1e-7) for name, value in vectors.items()]
        assert any(moved) == is_tuned  # 8 significant bits


def test_buffers_are_exact(tmp_path):
    """Also without elements, of other types in the same memory, and views that torch computes when they are read."""
    model = with_every_weight_used(OwnGPT())
    model.nothing = nn.Parameter(torch.empty(0, 3))
    turns = torch.polar(torch.ones(3), torch.arange(3.0))
    buffers = [torch.empty(0), torch.empty(0, 3, dtype=torch.bool), model.angles.view(torch.int32), model.angles]
    for index, buffer in enumerate([*buffers, turns, turns.conj(), turns.conj().imag]):
        model.register_buffer(f"b{index}", buffer)
    packed = pack(model, batches(), 20_000, tmp_path / "packed")
    state = unpack(str(packed.folder / "artifact.bin"))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        assert state[name].dtype == buffer.dtype and torch.equal(state[name], buffer), name
    assert state["b3"] is state["angles"] is not state["b2"]


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compiled_blocks(model):
    model.blocks = nn.Sequential(*(torch.compile(block, backend="eager") for block in model.blocks))
    return model


@pytest.mark.parametrize(
    "compiled", [lambda model: torch.compile(model, backend="eager"), compiled_blocks, compiled_forward]
)
def test_a_compiled_model_is_measured_as_any_other(compiled):
    model = with_every_weight_used(OwnGPT())
    plain = measure_curvature(model, batches())
    measured = measure_curvature(compiled(model), batches())
    assert [name.replace("_orig_mod.", "") for name in measured] == [*plain]
    for one, other in zip(plain.values(), measured.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(other.row_weights), torch.from_numpy(one.row_weights))


def test_a_packed_compiled_model_has_its_names(tmp_path):
    model: Any = torch.compile(with_every_weight_used(OwnGPT()), backend="eager")
    packed = pack(model, batches(), 20_000, tmp_path / "packed")
    assert packed.loss_after == pytest.approx(packed.loss_before, abs=0.5)
    assert packed.kept.keys() == {"_orig_mod.mix"}
    model.load_state_dict(unpack(str(packed.folder / "artifact.bin")), strict=True)


def test_a_batch_may_be_what_the_model_takes():
    """Ids, keyword arguments with labels, or positional ones: the same text has the same curvature."""
    model = with_every_weight_used(OwnGPT(is_tied=False))
    ids = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    by_name, by_place = (
        measure_curvature(model, [batch]) for batch in ({"ids": inputs, "targets": targets}, (inputs, targets))
    )
    shifted = measure_curvature(model, [{"ids": inputs, "shift_labels": targets}])
    for name, one in by_name.items():
        for other in (by_place, shifted):
            torch.testing.assert_close(torch.from_numpy(other[name].row_weights), torch.from_numpy(one.row_weights))
    llama = with_every_weight_used(tiny_model("llama"))
    own, next_token = (measure_curvature(llama, [batch]) for batch in ({"input_ids": ids, "labels": ids}, ids))
    name = "model.layers.1.mlp.down_proj.weight"
    ratio = torch.from_numpy(own[name].row_weights / next_token[name].row_weights)
    torch.testing.assert_close(ratio, torch.full_like(ratio, (LENGTH + 1) / LENGTH), rtol=1e-3, atol=0)


def test_a_matrix_stored_as_inputs_by_outputs_has_the_curvature_of_a_linear_layer():
    linear, conv = nn.Linear(VOCABULARY, WIDTH), Conv1D(WIDTH, VOCABULARY)
    conv.load_state_dict({"weight": linear.weight.T, "bias": linear.bias})
    found = []
    for layer in (linear, conv):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), layer, nn.Tanh(), nn.Linear(WIDTH, VOCABULARY))
        found.append(measure_curvature(model, batches())["1.weight"])
    assert found[0].row_weights.shape == (WIDTH,)
    torch.testing.assert_close(*(torch.from_numpy(one.row_weights) for one in found))
    torch.testing.assert_close(*(torch.from_numpy(one.hessian) for one in found))


def test_a_scaled_embedding_has_the_curvature_of_its_table():
    """Gemma's embedding multiplies what it looks up, so its table moves the loss by that much more."""
    model = with_every_weight_used(tiny_model("gemma3_text", {"tie_word_embeddings": False}))
    name, batch = "model.embed_tokens.weight", batches(1)[0]
    measured = measure_curvature(model, [batch])[name]
    scale = model.model.embed_tokens.embed_scale.item()
    assert scale**2 == pytest.approx(WIDTH, rel=0.02)
    model.model.embed_tokens.embed_scale.fill_(1.0)
    model.get_parameter(name).data *= scale
    plain = measure_curvature(model, [batch])[name]
    assert measured.hessian.trace() / plain.hessian.trace() == pytest.approx(scale**2, rel=0.05)


def test_what_cannot_be_seen_keeps_its_precision_and_is_named(tmp_path):
    """A head that is no layer, attention that reads its matrices itself: rounding them blindly would ruin the model."""
    model = with_every_weight_used(OwnGPT(has_head=False))
    assert "tokens.weight" not in measure_curvature(model, batches())
    packed = pack(model, batches(), 22_000, tmp_path / "packed")
    assert packed.kept.keys() == {"mix", "tokens.weight"} and packed.kept["tokens.weight"] > 0.8 * VOCABULARY * WIDTH
    state = unpack(str(packed.folder / "artifact.bin"))
    torch.testing.assert_close(state["tokens.weight"], model.tokens.weight.detach(), rtol=2**-7.8, atol=1e-6)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
    other = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layer, nn.Linear(WIDTH, VOCABULARY))
    names = {"0.weight", "1.linear1.weight", "1.linear2.weight", "2.weight"}
    assert measure_curvature(with_every_weight_used(other), batches()).keys() == names
    other = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Detached(), nn.Linear(WIDTH, VOCABULARY))
    assert measure_curvature(with_every_weight_used(other), batches()).keys() == {"0.weight", "2.weight"}


def test_a_budget_that_cannot_be_reached_is_refused_before_anything_is_measured(tmp_path):
    def never(ids):
        raise AssertionError("the model was called")

    model = OwnGPT()
    model.forward = never
    with pytest.raises(UserError, match=r"^budget_bytes: 3,500 is too small: with zeros .* still take [\d,]+ bytes"):
        pack(model, batches(), 3_500, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_what_cannot_be_packed_is_refused_in_one_line(tmp_path):
    model, budget = OwnGPT(), 20_000
    with pytest.raises(UserError, match=r"^batches: there are none"):
        pack(model, [], budget, tmp_path / "packed")
    with pytest.raises(UserError, match=r"^batches: no token in them is a target"):
        pack(model, [ids[:, :1] for ids in batches()], budget, tmp_path / "packed")
    with pytest.raises(UserError, match=r"^batches: Embedding returned neither a loss nor logits"):
        pack(nn.Embedding(VOCABULARY, WIDTH), [torch.zeros(3, dtype=torch.long)], budget, tmp_path / "packed")
    with pytest.raises(UserError, match=r"^batches: no token in them is a target"):
        pack(model, [(ids, torch.full_like(ids, -100)) for ids in batches()], budget, tmp_path / "packed")
    for not_batches in (None, ["to be"], batches()[0], [ids + VOCABULARY for ids in batches()], [{"text": 1}]):
        with pytest.raises(UserError, match=r"^batches: OwnGPT does not run on one \(\w+: .*\); give a list") as caught:
            pack(model, not_batches, budget, tmp_path / "packed")
        assert caught.value.__cause__ is not None, "what the model raised"
    for no_model in ("gpt2", OwnGPT, nn.ReLU()):
        with pytest.raises(UserError, match=r"^model: .* is no nn.Module with linear layers or embeddings"):
            pack(no_model, batches(), budget, tmp_path / "packed")
    with pytest.raises(UserError, match=r"^model: mix of its state dict is no dense tensor with values"):
        pack(OwnGPT().to("meta"), batches(), budget, tmp_path / "packed")
    sparse = OwnGPT()
    sparse.register_buffer("links", torch.eye(3).to_sparse())
    with pytest.raises(UserError, match=r"^model: links of its state dict is no dense tensor with values"):
        pack(sparse, batches(), budget, tmp_path / "packed")
    for no_budget in ("2MB", float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"^budget_bytes: .* is no number of bytes, such as 500_000"):
            pack(model, batches(), no_budget, tmp_path / "packed")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"^folder: .*mine exists and pack did not write it"):
        pack(model, batches(), budget, tmp_path / "mine")
    angles = model.angles.clone()
    model.angles.fill_(math.inf)
    with pytest.raises(UserError, match=r"^model: its loss on the calibration text is not finite"):
        pack(model, batches(), budget, tmp_path / "packed")
    model.angles.copy_(angles)
    nn.init.constant_(model.blocks[0].out.weight[3], math.nan)
    with pytest.raises(UserError, match=r"^model: blocks.0.out.weight has values that are nonfinite"):
        pack(model, batches(), budget, tmp_path / "packed")


def test_a_damaged_artifact_is_refused(own, tmp_path):
    shutil.copytree(own[1].folder, tmp_path / "packed")
    data = bytearray((tmp_path / "packed" / "artifact.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "packed" / "artifact.bin").write_bytes(data)
    command = [sys.executable, "-I", "unpack.py", "artifact.bin"]
    said = subprocess.run(command, cwd=tmp_path / "packed", capture_output=True, text=True, check=False)
    assert said.returncode == 1 and said.stderr.startswith("error: artifact.bin: it is damaged"), said.stderr
