"""The switches of golf: each against its formula, and the two stacks of the challenge against their descriptions."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference_stacks import baseline_logits, record_logits

from hfgolf.commands.needs import meta_model
from hfgolf.config.parse import load_config
from hfgolf.model.layers_golf import GolfBigram, _rotation, sdpa
from hfgolf.model.modeling_golf import GolfForCausalLM
from hfgolf.optim.groups import parameter_kind

SEPARATOR = 7


def logits_of(golf, token_ids):
    with torch.no_grad():
        return golf(token_ids).logits


def plain(golf):
    return golf.double(), {name: weight.double() for name, weight in golf.state_dict().items()}


def test_baseline_matches_its_description(build_golf, all_options, token_ids):
    golf, weights = plain(build_golf(**all_options["golf_baseline"]))
    expected = torch.stack([baseline_logits(weights, row, golf.config) for row in token_ids])
    torch.testing.assert_close(logits_of(golf, token_ids), expected, rtol=1e-6, atol=1e-6)  # angles are fp32


@pytest.mark.parametrize("loop_active", [True, False])
def test_record_matches_its_description(build_golf, all_options, token_ids, loop_active):
    token_ids[0, [0, 6, 7]] = token_ids[1, 9] = SEPARATOR
    golf, weights = plain(build_golf(**all_options["golf_record"], loop_active=loop_active))
    # the loop of layers 2 and 3, three times: ten passes, of which the first five are the encoder
    encoder, decoder = ([0, 1, 2, 3, 2], [3, 2, 3, 4, 5]) if loop_active else ([0, 1, 2], [3, 4, 5])
    expected = torch.stack([record_logits(weights, row, golf.config, encoder, decoder) for row in token_ids])
    torch.testing.assert_close(logits_of(golf, token_ids), expected, rtol=1e-6, atol=1e-6)


TRANSPARENT = {
    "query_gain": {"query_gain": 1.0},
    "branch_scale": {"branch_scale": True},
    "embedding_residual": {"embedding_residual": True},
    "rope_dims": {"rope_dims": 8},
    "transparent_head_gate": {"head_gate": 12, "head_gate_peak": 2.0},
    "smear_gate": {"smear_gate": 12},
    "bigram": {"bigram_buckets": 50, "bigram_size": 6},
    "value_embedding": {"value_embedding_layers": 2, "value_embedding_size": 6},
    "document_without_separators": {"attention_span": "document", "bos_token_id": 60},
    "loop_not_active": {"loop": [0, 1, 3], "loop_active": False},
}


@pytest.mark.parametrize("switch", list(TRANSPARENT.values()), ids=list(TRANSPARENT))
def test_transparent_switch_changes_nothing_at_the_start(build_golf, token_ids, switch):
    token_ids = token_ids.clamp(max=59)
    default, golf = build_golf(), build_golf(fresh=True, **switch)
    missing = golf.load_state_dict(default.state_dict(), strict=False)
    assert not missing.unexpected_keys
    torch.testing.assert_close(logits_of(golf, token_ids), logits_of(default, token_ids), rtol=1e-5, atol=1e-5)
    switched = build_golf(**switch)  # and trained, it changes something, if it has parameters
    switched.load_state_dict(default.state_dict(), strict=False)
    changes = (logits_of(switched, token_ids) - logits_of(default, token_ids)).abs().max() > 1e-3
    assert changes == bool(missing.missing_keys)


def test_document_span_gives_the_logits_of_each_document_alone(build_golf, all_options, token_ids):
    row = torch.where(token_ids == SEPARATOR, SEPARATOR + 1, token_ids)[:1]
    row[0, [0, 5, 12]] = SEPARATOR
    for implementation in ("sdpa", "eager"):
        golf = build_golf(**all_options["golf_record"])
        golf.set_attn_implementation(implementation)
        together = logits_of(golf, row)
        for start, end in ((0, 5), (5, 12), (12, 17)):
            alone = logits_of(golf, row[:, start:end])
            torch.testing.assert_close(together[:, start:end], alone, rtol=1e-4, atol=1e-4)
    stream = build_golf(**all_options["golf_record"] | {"attention_span": "stream"})
    assert (logits_of(stream, row)[:, 5:12] - logits_of(stream, row[:, 5:12])).abs().max() > 1e-2


def test_bigrams_are_hashed_as_published(token_ids):
    bigram = GolfBigram(SimpleNamespace(bigram_buckets=10, bigram_size=1, hidden_size=1))
    with torch.no_grad():
        bigram.table.weight.copy_(torch.arange(10.0)[:, None])
        bigram.proj.weight.fill_(2.0)
        bigram.scale.fill_(0.5)
    row = token_ids[0].tolist()
    rows = [9, *(((36313 * now) ^ (27191 * before)) % 9 for before, now in pairwise(row))]
    assert bigram(token_ids[:1], torch.arange(len(row)))[0, :, 0].tolist() == rows


def test_matrices_are_initialized_as_stated(build_golf):
    uniform = build_golf(fresh=True, matrix_init="uniform", hidden_size=256).model.layers[0]
    weight = uniform.self_attn.qkv_proj.weight
    assert 0.99 / 16 < weight.abs().max() <= 1 / 16  # +-1 / sqrt(256)
    assert weight.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.02)
    orthogonal = build_golf(fresh=True, matrix_init="orthogonal", num_key_value_heads=2)
    for name, rows in orthogonal.fused_projections().items():
        for part in orthogonal.get_parameter(name).split(rows):
            torch.testing.assert_close(part @ part.T, torch.eye(len(part)), rtol=1e-5, atol=1e-5)
    up = orthogonal.model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(up.T @ up, torch.eye(32), rtol=1e-5, atol=1e-5)
    assert not orthogonal.model.layers[0].mlp.down_proj.weight.any()
    golf = build_golf(fresh=True, vocab_size=4096, tied_embedding_std=0.005)
    assert golf.model.embed_tokens.weight.std().item() == pytest.approx(0.005, rel=0.02)
    assert golf.lm_head.weight is golf.model.embed_tokens.weight


def test_switch_parameters_reset_to_their_start(build_golf, all_options, tmp_path):
    """Weights that a file lacks start as in a new model: not at what the memory held."""
    golf = build_golf(fresh=True, **all_options["golf_record"])
    kept = {name: weight for name, weight in golf.state_dict().items() if "proj" in name}
    golf.save_pretrained(tmp_path, state_dict=kept)
    again = GolfForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in golf.state_dict().items():
        if "embed_tokens" not in name and "lm_head" not in name:
            torch.testing.assert_close(again[name], weight)
    assert golf.state_dict()["model.lane_mix"].tolist() == [[[pytest.approx(1.1), 1, 1]] * 2] * 6


@pytest.mark.parametrize("switch", ["smear_gate", "document", "bigram", "golf_record"])
def test_switch_that_reads_earlier_ids_generates_without_a_cache(build_golf, all_options, token_ids, switch):
    golf = build_golf(**all_options[switch])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    said = golf.generate(token_ids, attention_mask=torch.ones_like(token_ids), **options)
    following = logits_of(golf, said[:, :-1])[:, 16:].argmax(dim=-1)  # the definition of greedy
    assert torch.equal(following, said[:, 17:])
    with pytest.raises(ValueError, match=r"needs earlier ids, which no KV cache keeps; pass use_cache=False\.$"):
        golf(token_ids, use_cache=True)
    with pytest.raises(ValueError, match="needs input_ids"):
        golf(inputs_embeds=golf.model.embed_tokens(token_ids))


def test_document_span_needs_a_separator_and_a_mask(build_golf, token_ids):
    golf = build_golf(attention_span="document")
    with pytest.raises(ValueError, match="needs bos_token_id"):
        golf(token_ids)
    golf.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="needs a mask"):
        golf(token_ids)


def test_factored_embedding_is_the_product_of_its_factors(build_golf, token_ids):
    factored, golf = build_golf(embedding_size=12, tie_word_embeddings=False), build_golf(tie_word_embeddings=False)
    state = factored.state_dict()
    table = state.pop("model.embed_tokens.weight") @ state.pop("model.embed_proj.weight").T
    head = state.pop("lm_head.weight") @ state.pop("head_proj.weight")
    golf.load_state_dict(state | {"model.embed_tokens.weight": table, "lm_head.weight": head})
    torch.testing.assert_close(logits_of(factored, token_ids), logits_of(golf, token_ids), rtol=1e-4, atol=1e-5)


def test_parallel_branches_read_one_normed_input(build_golf, token_ids):
    golf = build_golf(parallel_from=0, num_hidden_layers=1)
    block, seen = golf.model.layers[0], {}
    for name, module in (("attention", block.self_attn.qkv_proj), ("mlp", block.mlp.up_proj), ("block", block)):
        module.register_forward_hook(lambda m, inputs, output, name=name: seen.update({name: (inputs[0], output)}))
    logits_of(golf, token_ids)
    assert torch.equal(seen["attention"][0], seen["mlp"][0])
    assert not [name for name in golf.state_dict() if "post_attention" in name]
    x = seen["block"][0]
    normed, rotation = block.input_layernorm(x), _rotation(torch.arange(17)[None], golf.config)
    expected = x + block.self_attn(normed, rotation, None)[0] + block.mlp(normed)
    torch.testing.assert_close(seen["block"][1], expected)


def test_value_embeddings_are_added_to_the_values(build_golf, token_ids):
    golf = build_golf(value_embedding_layers=1, value_embedding_size=6, num_key_value_heads=2)
    extra, attention, seen = golf.model.value_embedding, golf.model.layers[1].self_attn, {}
    assert golf.model.layers[0].self_attn.value_embedding_scale is None

    def spy(module, query, key, value, *arguments, **options):
        seen[module.layer_idx] = value
        return sdpa(module, query, key, value, *arguments, **options)

    attention.qkv_proj.register_forward_hook(lambda module, inputs, output: seen.update(own=output[..., -16:]))
    with torch.no_grad():
        embedded, positions = golf.model.embed_tokens(token_ids), torch.arange(17)[None]
        golf.model.run(embedded, positions, token_ids, attention_mask=None, attend=spy)
        added = 0.1 * attention.value_embedding_scale * (extra.table(token_ids) @ extra.proj.weight.T)
    expected = (seen["own"] + added).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(seen[1], expected)


@pytest.mark.parametrize(
    ("config", "vocabulary", "parameters", "others"),
    [("golf_baseline.yaml", 1024, 17_059_912, 20_552), ("golf_record.yaml", 8192, 35_945_671, 31_943)],
)
def test_shipped_stacks_have_exactly_the_published_parameters(config, vocabulary, parameters, others):
    run_config = load_config(["--config", str(Path(__file__).parents[2] / "configs" / config)]).config
    assert run_config.tokenizer.vocab_size == vocabulary
    golf = meta_model(run_config.replace(train__mixed_precision="no"), vocabulary, "cpu")
    assert golf.num_parameters() == parameters
    vectors = sum(p.numel() for name, p in golf.named_parameters() if parameter_kind(name) == "vector")
    assert vectors == others
