"""Generation: the cache, padding and positions must not change the text."""

import pytest
import torch

GOLF = ("loop", "loop_of_the_middle", "lanes", "value_embedding", "exclude_self_value", "head_gate", "golf_baseline")


@pytest.fixture(params=["modern", "learned", "no_positions", "one_key_value_head", "gpt2", *GOLF])
def option(request, all_options):
    """The options whose positions, masks or cache differ."""
    return all_options[request.param]


def generate(golf, token_ids, **options):
    # Pass the mask: generate() would otherwise treat prompt tokens with the pad token's id as padding.
    options = {"attention_mask": torch.ones_like(token_ids), "pad_token_id": 0, "eos_token_id": None, **options}
    return golf.generate(token_ids, max_new_tokens=12, do_sample=False, **options)


def left_padded(rows):
    longest = max(len(row) for row in rows)
    token_ids = torch.stack([torch.cat([row.new_full((longest - len(row),), 7), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return token_ids, mask


def test_greedy_generation_is_the_same_with_and_without_a_cache(build_golf, option, token_ids):
    golf = build_golf(**option)
    without = generate(golf, token_ids, use_cache=False)
    assert torch.equal(generate(golf, token_ids), without)
    following = golf(without[:, :-1]).logits[:, 16:].argmax(dim=-1)  # the definition of greedy
    assert torch.equal(following, without[:, 17:])


@pytest.mark.parametrize("name", ["modern", "loop_of_the_middle"])
def test_static_cache_generates_the_same(build_golf, all_options, token_ids, name):
    golf = build_golf(**all_options[name])
    # disable_compile: compiling the decode step is transformers' job, and slow on a CPU
    said = generate(golf, token_ids, cache_implementation="static", disable_compile=True)
    assert torch.equal(said, generate(golf, token_ids))


def test_left_padded_batch_generates_what_each_prompt_does_alone(build_golf, option, token_ids):
    golf = build_golf(**option)
    rows = [token_ids[0], token_ids[1, :11], token_ids[2, :3]]
    padded, mask = left_padded(rows)
    together = generate(golf, padded, attention_mask=mask)
    for row, said in zip(rows, together, strict=True):
        assert torch.equal(said[-12:], generate(golf, row[None])[0, -12:])


def test_positions_follow_the_attention_mask(build_golf, option, token_ids):
    golf = build_golf(**option)
    row = token_ids[0, :9]
    padded, mask = left_padded([token_ids[1], row])
    alone = golf(row[None]).logits[0]
    together = golf(padded, attention_mask=mask).logits[1, -9:]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_prompt_in_pieces_gives_the_logits_of_the_whole(build_golf, option, token_ids):
    golf = build_golf(**option)
    whole = golf(token_ids).logits
    first = golf(token_ids[:, :6], use_cache=True)
    second = golf(token_ids[:, 6:11], past_key_values=first.past_key_values)  # several queries, more keys
    third = golf(token_ids[:, 11:], past_key_values=second.past_key_values)
    pieces = torch.cat([first.logits, second.logits, third.logits], dim=1)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)


def test_generating_past_the_learned_positions_names_the_limit(build_golf, token_ids):
    golf = build_golf(position_embedding="learned", max_position_embeddings=20)
    with pytest.raises(ValueError, match="max_position_embeddings=20"):
        generate(golf, token_ids)
