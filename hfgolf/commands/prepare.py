"""Tokenize the text of a config before training: hfgolf prepare --config configs/small.yaml

Training then finds the tokens in the cache. Verifies the hashes of an existing cache. Builds no model and needs no GPU.
"""

import time
from typing import Any

from hfgolf.commands.options import Answer, ScriptParser
from hfgolf.config.parse import load_config


def main() -> Answer:
    parser = ScriptParser(__doc__, "Also takes the options of hfgolf train: --config FILE --section.key value.")
    _, run_options = parser.parse_known_args()
    resolved = load_config(run_options, needs_limit=False, may_choose=False, verb="prepare")
    from hfgolf.data.files import require_paths

    require_paths(resolved.config.data)  # before loading torch
    from hfgolf.data.token_cache import load_tokens
    from hfgolf.train.console import show_log

    show_log(is_main_process=True, is_verbose=True)
    config = resolved.config
    if config.model.init_from is not None:
        from hfgolf.train.init_from import take_architecture  # late: it imports models

        config = take_architecture(resolved).config
    started_at = time.perf_counter()
    # memory-mapped: there is no training here that would need them in RAM
    tokens = load_tokens(config.data.replace(in_memory=False), config.tokenizer)
    tokens.check(wait=True)
    seconds = time.perf_counter() - started_at
    lines, figures = [], dict[str, Any]()
    for name, stream in (("train", tokens.train), ("val", tokens.val)):
        num_bytes = stream.num_bytes
        figures[name] = {"tokens": len(stream), "bytes": num_bytes}
        counted = f" {num_bytes:>18,} bytes {num_bytes / len(stream):>6.2f} bytes per token" if num_bytes else ""
        if stream.is_target is not None:
            figures[name]["assistant_tokens"] = int(stream.is_target.sum())
            counted = f" {figures[name]['assistant_tokens']:>18,} of the assistant ({num_bytes:,} bytes of its text)"
        lines.append(f"{name:<6}{len(stream):>16,} tokens{counted}")
    for name, text in tokens.texts.items():
        one = {"train_tokens": len(text.train), "val_tokens": len(text.val), "folder": text.path}
        figures.setdefault("texts", {})[name] = one
        lines.append(f"{name}: {len(text.train):,} train and {len(text.val):,} validation tokens, {text.path}")
    megabytes = (tokens.train.num_bytes + tokens.val.num_bytes) / 1e6
    speed = f"{megabytes:,.1f} MB in {seconds:.1f} s, {megabytes / seconds:.1f} MB/s"
    lines.append(f"{tokens.path}: {'already cached' if tokens.is_hit else speed}")
    figures |= {"folder": tokens.path, "was_cached": tokens.is_hit, "seconds": seconds}
    return Answer(figures, "\n".join(lines))
