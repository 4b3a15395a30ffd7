"""Evaluate a model on text: python scripts/evaluate.py --model runs/small/model --files "texts/*.txt" """

import json
import tempfile
from pathlib import Path

from hfgolf.command_line import run_command
from hfgolf.script_options import ScriptParser, within


def main() -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a causal model (runs/NAME/model) or a Hub name")
    parser.add_argument("--files", required=True, nargs="+", help="paths, globs or URLs, as in data.files")
    parser.add_argument("--text_column", default="text", help="column of jsonl, csv and parquet files (text)")
    parser.add_argument("--sequence_length", type=within(1, 2**24), help="tokens of context (default: the model's own)")
    parser.add_argument("--batch_size", type=within(1, 2**16), default=8, help="sequences per forward pass (8)")
    parser.add_argument(
        "--evaluation",
        choices=("flat", "sliding", "documents"),
        default="flat",
        help="flat: rows end to end (default); sliding: overlapping windows, so that each token has context; documents:"
        " sliding windows that never cross a separator",
    )
    parser.add_argument(
        "--stride", type=within(1, 2**24), help="tokens that each window scores (default: half of --sequence_length)"
    )
    parser.add_argument("--drop_tail", action="store_true", help="flat: leave out the last row if it is not full")
    parser.add_argument("--skip_separators", action="store_true", help="documents: do not score separators")
    parser.add_argument(
        "--mixed_precision", choices=("no", "bf16", "fp16"), help="default: what a run on this machine would use"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    for option, mode in (("stride", "sliding or documents"), ("drop_tail", "flat"), ("skip_separators", "documents")):
        if getattr(arguments, option) and arguments.evaluation not in mode:
            parser.error(f"--{option} needs --evaluation {mode}, but it is {arguments.evaluation}")

    from accelerate import Accelerator

    from hfgolf.command_line import ResolvedConfig
    from hfgolf.config import RunConfig, TrainConfig
    from hfgolf.evaluate.context import evaluation_length
    from hfgolf.evaluate.loss import describe, evaluate_plan, plan_evaluation
    from hfgolf.evaluate.text import tokenize_files
    from hfgolf.model.causal_blocks import choose_attention
    from hfgolf.publish.load import load_exported
    from hfgolf.train.console import quiet_libraries
    from hfgolf.train.process import resolve_precision
    from hfgolf.train.signals import Signals

    train = TrainConfig(max_steps=1, mixed_precision=arguments.mixed_precision)
    resolved = ResolvedConfig(RunConfig(train=train), {"train.mixed_precision": "the command line"})
    precision = resolve_precision(resolved).config.train.mixed_precision
    accelerator = Accelerator(mixed_precision=precision)
    quiet_libraries()
    model, tokenizer = load_exported(arguments.model)
    sequence_length = evaluation_length(model, arguments.sequence_length)
    stride = arguments.stride or max(1, sequence_length // 2)
    if stride > sequence_length:
        parser.error(f"--stride: {stride} is out of range; allowed: 1 to {sequence_length}, the --sequence_length")
    choose_attention(
        model, accelerator.device, precision, sequence_length
    )  # same attention as in training, so that the loss in bf16 is the same
    with Signals("before the end; nothing was written"), tempfile.TemporaryDirectory() as folder:
        vocab_size = next(model.get_input_embeddings().parameters()).shape[0]
        stream = tokenize_files(arguments.files, tokenizer, vocab_size, arguments.text_column, Path(folder))
        plan, num_bytes = plan_evaluation(
            stream,
            tokenizer,
            arguments.evaluation,
            sequence_length,
            stride,
            drop_tail=arguments.drop_tail,
            skip_separators=arguments.skip_separators,
        )
        model = model.to(accelerator.device)
        evaluation = evaluate_plan(model, stream, accelerator, plan, num_bytes, batch_size=arguments.batch_size)
    if not accelerator.is_main_process:
        return
    figures = {name: getattr(evaluation, name) for name in ("loss", "perplexity", "bits_per_byte")}
    figures |= {"num_tokens": evaluation.num_tokens, "num_bytes": evaluation.num_bytes}
    if arguments.json:
        figures |= {"coverage": plan.coverage()}
        settings = {"model": arguments.model, "sequence_length": sequence_length, "mixed_precision": precision}
        print(json.dumps(settings | figures))
        return
    print(f"{'model':<15}{arguments.model}")
    print(f"{'text':<15}{evaluation.num_bytes:,} bytes, {evaluation.num_tokens:,} tokens")
    print(f"{'context':<15}{sequence_length:,} tokens, precision {precision}")
    print(f"{'coverage':<15}{describe(plan)}")
    print(f"{'loss':<15}{evaluation.loss:.4f} nats per token")
    print(f"{'perplexity':<15}{evaluation.perplexity:,.4f}")
    print(f"{'bits per byte':<15}{evaluation.bits_per_byte:.4f}")


if __name__ == "__main__":
    run_command(main)
