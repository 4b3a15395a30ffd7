"""Generation: caches, padding and positions must not change the text, which is that of full passes by hand."""

import inspect

import pytest
import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

from hfgolf.model.causal_lm import checkpoint_layers
from hfgolf.model.modeling_golf import CACHE, GolfForCausalLM, GolfModel

WAYS = {
    "without a cache": {"use_cache": False},
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},  # compiling is slow, and transformers' job
    "prompt in chunks": {"prefill_chunk_size": 5},
    "guesses from the prompt": {"prompt_lookup_num_tokens": 3},
}
GOLF = ("loop_of_the_middle", "lanes", "value_embedding", "exclude_self_value", "head_gate")
CACHED = ("modern", "learned", "no_positions", "one_key_value_head", *GOLF)


@pytest.fixture(params=CACHED)
def option(request, all_options):
    """The options whose positions, masks or cache differ."""
    return all_options[request.param]


def generate(golf, token_ids, new_tokens=12, **options):
    # Pass the mask: generate() would otherwise treat prompt tokens with the pad token's id as padding.
    options = {"attention_mask": torch.ones_like(token_ids), "pad_token_id": 0, "eos_token_id": None, **options}
    return golf.generate(token_ids, max_new_tokens=new_tokens, do_sample=False, **options)


@torch.no_grad()
def greedy(golf, token_ids, new_tokens=12):
    """The definition of greedy generation: full passes, without a cache or a mask."""
    for _ in range(new_tokens):
        following = golf(token_ids, use_cache=False).logits[:, -1:].argmax(dim=-1)
        token_ids = torch.cat([token_ids, following], dim=1)
    return token_ids


@torch.no_grad()
def best_beam(golf, row, beams, new_tokens=12):
    """The definition of beam search where nothing ends a text: the `beams` likeliest after each token."""
    texts, scores = row[None], torch.zeros(1)
    for _ in range(new_tokens):
        scored = scores[:, None] + golf(texts, use_cache=False).logits[:, -1].log_softmax(dim=-1)
        scores, places = scored.flatten().topk(beams)
        texts = torch.cat([texts[places // scored.shape[1]], (places % scored.shape[1])[:, None]], dim=1)
    return texts[0]


def left_padded(rows):
    longest = max(len(row) for row in rows)
    token_ids = torch.stack([torch.cat([row.new_full((longest - len(row),), 7), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return token_ids, mask


@pytest.mark.parametrize("way", WAYS)
def test_greedy_generation_is_that_of_full_passes(build_golf, option, token_ids, way):
    golf = build_golf(**option)
    rows = token_ids[:1] if "guesses" in way else token_ids  # transformers guesses for one text at a time
    assert torch.equal(generate(golf, rows, **WAYS[way]), greedy(golf, rows))


def test_beam_search_finds_the_text_of_full_passes(build_golf, option, token_ids):
    golf = build_golf(**option)
    found = generate(golf, token_ids, num_beams=3)
    for row, text in zip(token_ids, found, strict=True):
        assert torch.equal(text, best_beam(golf, row, 3))


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *(("modern", "sdpa"), ("learned", "paged|eager"), ("one_key_value_head", "paged|eager")),
        *(("head_gate", "sdpa"), ("exclude_self_value", "sdpa")),
    ],
)
def test_paged_cache_generates_the_text_of_full_passes(build_golf, all_options, token_ids, name, attention):
    golf = build_golf(**all_options[name])
    prompts = [token_ids[0, :5], token_ids[1], token_ids[2, :3]]
    expected = [greedy(golf, prompt[None], 9)[0, len(prompt) :].tolist() for prompt in prompts]
    golf.set_attn_implementation(attention)
    options = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)  # else it takes most of the memory
    found = golf.generate_batch([each.tolist() for each in prompts], options, small)
    assert [found[name].generated_tokens for name in sorted(found)] == expected


@pytest.mark.parametrize("name", [*CACHED, "smear_gate", "bigram", "document", "golf_record"])
def test_left_padded_batch_generates_what_each_prompt_does_alone(build_golf, all_options, token_ids, name):
    golf = build_golf(**all_options[name])
    rows = [token_ids[0], token_ids[1, :11], token_ids[2, :3]]
    padded, mask = left_padded(rows)
    together = generate(golf, padded, attention_mask=mask)
    for row, said in zip(rows, together, strict=True):
        assert torch.equal(said[-12:], greedy(golf, row[None])[0, -12:])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_prompt_in_pieces_gives_the_logits_of_the_whole(build_golf, option, token_ids, name):
    golf = build_golf(**option)
    whole = golf(token_ids, use_cache=False).logits
    cache, pieces = None, []
    for start, end in ((0, 6), (6, 11), (11, None)):  # several queries, more keys
        outputs = golf(token_ids[:, start:end], use_cache=True, **{name: cache})
        cache = outputs[CACHE]
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["whole", "base"])
def test_an_unknown_argument_is_refused(build_golf, token_ids, part):
    golf = build_golf()
    golf = golf if part == "whole" else golf.model
    assert golf(token_ids, token_type_ids=None) is not None, "callers pass the defaults of arguments on"
    with pytest.raises(TypeError, match="does not know: token_type_ids"):
        golf(token_ids, token_type_ids=torch.ones_like(token_ids))


def test_every_argument_by_which_transformers_hands_over_a_cache_is_taken():
    taken = set(inspect.signature(GolfForCausalLM.forward).parameters)
    assert {CACHE, "past_key_values", "cache"} <= taken
    of_the_head = taken - set(inspect.signature(GolfModel.forward).parameters)
    assert of_the_head == {"labels", "num_items_in_batch", "logits_to_keep", "return_logits"}


def test_an_engine_with_its_own_attention_is_refused(build_golf, token_ids):
    """vLLM asks the class; if it is told to go on, it passes its attention of all layers, whose output has two axes."""
    attention = {0: lambda query, key, value: query.new_zeros(token_ids.shape[1], 48)}
    assert not GolfForCausalLM.is_backend_compatible() and not GolfModel.is_backend_compatible()
    with pytest.raises(TypeError, match="does not know: attention_instances"):
        build_golf().model(token_ids[:1], use_cache=False, attention_instances=attention)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_arguments_that_it_cannot_follow_are_refused(build_golf, token_ids):
    golf = build_golf()
    filled = golf(token_ids, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="is_causal"):
        golf(token_ids, is_causal=False)
    checkpoint_layers(golf.train())
    with pytest.raises(ValueError, match="gradient checkpointing"):
        golf(token_ids, **{CACHE: filled})
    assert getattr(golf(token_ids, use_cache=True), CACHE) is None
    with pytest.raises(ValueError, match="one layer for each layer"):
        build_golf(loop=[0, 1, 2])(token_ids, cache=object())
    if CACHE == "past_key_values":
        with pytest.raises(ValueError, match="at most one"):
            golf(token_ids, cache=filled, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="instead of keys and values in a tuple"):
        build_golf()(token_ids, past_key_values=tuple((layer.keys, layer.values) for layer in filled.layers))


def test_logits_to_keep_takes_the_forms_of_transformers(build_golf, token_ids):
    golf = build_golf(logit_soft_cap=5.0)
    whole = golf(token_ids).logits
    assert whole.abs().max() <= 5
    places = torch.tensor([[0, 3], [5, 1], [15, 15]])
    mask = torch.zeros_like(token_ids, dtype=torch.bool)
    mask[0, 2] = mask[2, 4:6] = True
    for keep, expected in (
        (0, whole),
        (3, whole[:, -3:]),
        (torch.tensor([1, 4]), whole[:, [1, 4]]),
        (places, torch.stack([row[at] for row, at in zip(whole, places, strict=True)])),
        (mask, whole[mask]),
    ):
        torch.testing.assert_close(golf(token_ids, logits_to_keep=keep).logits, expected)


@torch.no_grad()
def test_a_mask_of_all_places_of_a_static_cache_says_what_a_shorter_one_does(build_golf, option, token_ids):
    golf = build_golf(**option)
    lengths = [17, 12, 9]  # left padding, so that positions are not places
    mask = torch.zeros(3, 32, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, 17 - length : 17] = 1
    expected = golf(token_ids, attention_mask=mask[:, :17], use_cache=False).logits
    cache = StaticCache(config=golf.config, max_cache_len=32)
    logits = golf(token_ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
    following, mask[:, 17] = logits[:, -1:].argmax(-1), 1
    after = golf(following, attention_mask=mask, past_key_values=cache, use_cache=True).logits
    longer = torch.cat([token_ids, following], dim=1)
    expected_after = golf(longer, attention_mask=mask[:, :18], use_cache=False).logits[:, -1:]
    for row, length in enumerate(lengths):
        torch.testing.assert_close(logits[row, 17 - length :], expected[row, 17 - length :], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, expected_after, rtol=1e-4, atol=1e-4)
