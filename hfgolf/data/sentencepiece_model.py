"""SentencePiece *.model files as fast tokenizers with the same ids; transformers does not convert spaces.

Two differences remain: of equally good unigram segmentations the libraries may choose another one, and tokenizers'
nmt_nfkc drops a combining mark after a ligature. Needs protobuf, which wandb brings along.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

from hfgolf.system.errors import UserError

SPACE = "\u2581"  # how SentencePiece spells a space
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # types of pieces, by their numbers in the file
_UNIGRAM, _BPE = 1, 2  # types of models
_NEVER = -1000.0  # as the score of <s>, so that no text that spells it is read as it
_AWKWARD = " naïve café,  two spaces;\ttab\r\n\r\n你好 \U0001f600 e\u0301 ﬁ ½ HELLO x1234 \u2581 the end "


def load_sentencepiece(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a SentencePiece file: BPE or unigram, with or without byte fallback.

    Raises UserError if the file is damaged, or if SentencePiece itself, where installed, returns other ids.
    """
    where = f"tokenizer.name_or_path: {path}"
    model = import_protobuf().ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError
        raise UserError(f"{where} is not a SentencePiece model ({error}); copy it again.") from error
    if not model.pieces:
        raise UserError(f"{where} is not a SentencePiece model (it has no pieces); copy it again.")
    if model.trainer_spec.model_type not in (_UNIGRAM, _BPE):
        raise UserError(f"{where} is a SentencePiece model of words or characters; use BPE or unigram.")
    spec = model.trainer_spec
    specials = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id, "pad_token": spec.pad_id}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_convert(model),
        clean_up_tokenization_spaces=False,
        **{name: model.pieces[number].piece for name, number in specials.items() if 0 <= number < len(model.pieces)},
    )
    if find_spec("sentencepiece") is not None:
        _require_same_ids(path, model, tokenizer)
    return tokenizer


def _convert(model: Any) -> Tokenizer:
    pieces, spec = model.pieces, model.trainer_spec
    if spec.model_type == _BPE:
        merged = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
        numbers = {piece.piece: number for number, piece in enumerate(pieces)}
        others = set(numbers) - set(merged)  # merges must not build <s> from a text that spells it
        merges = generate_merges(numbers, merged, skip_tokens=others)
        unknown = pieces[spec.unk_id].piece
        tokenizer = Tokenizer(
            models.BPE(numbers, merges, unk_token=unknown, fuse_unk=True, byte_fallback=spec.byte_fallback)
        )
    else:
        scores = [(p.piece, p.score if p.type in (_NORMAL, _USER_DEFINED) else _NEVER) for p in pieces]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback))
    rules = model.normalizer_spec
    tokenizer.normalizer = _normalizer(rules)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            *([decoders.ByteFallback()] if spec.byte_fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []),
        ]
    )
    # symbols of the user are found after the normalizer, unless it would put a space in front of each of them, too
    is_normalized = not rules.add_dummy_prefix
    tokenizer.add_tokens([AddedToken(p.piece, normalized=is_normalized) for p in pieces if p.type == _USER_DEFINED])
    tokenizer.add_special_tokens([AddedToken(p.piece, normalized=False) for p in pieces if p.type == _CONTROL])
    return tokenizer


def _normalizer(rules: Any) -> normalizers.Sequence:
    """Return what SentencePiece does to a text: rewrite characters, drop spaces, put one in front, mark them."""
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if rules.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _require_same_ids(path: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Compare the ids with SentencePiece's on a text with awkward characters and every piece, in two orders."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [piece.piece.replace(SPACE, " ") for piece in model.pieces if piece.type == _NORMAL]
    shuffled = random.Random(0).sample(pieces, len(pieces))
    for text in (_AWKWARD, " ".join(pieces), "".join(shuffled)):
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        expected = processor.encode(text)
        if ids != expected:
            place = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), len(expected))
            raise UserError(
                f"tokenizer.name_or_path: {path} gives other ids by SentencePiece than by the tokenizers library, first"
                f" for {processor.decode(expected[place : place + 5])!r}; use another model, or its tokenizer.json."
            )
