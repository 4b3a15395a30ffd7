"""Generate text with a trained model: python scripts/generate.py --model runs/small/model --prompt "def main" """

import argparse

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, within


def main() -> None:
    parser = ScriptParser(__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of an exported model (runs/NAME/model) or a Hub name")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start a new document")
    parser.add_argument("--message", help="message to a chat model (data.messages_column), instead of --prompt")
    parser.add_argument(
        "--max_new_tokens", type=within(1, 10**9), default=200, help="maximum number of tokens to generate"
    )
    parser.add_argument("--temperature", type=within(0.0, 1e6), default=0.8, help="sampling temperature; 0: greedy")
    parser.add_argument(
        "--top_k", type=within(0, 10**9), default=50, help="sample from the K most likely tokens; 0: all"
    )
    parser.add_argument(
        "--top_p",
        type=within(1e-9, 1.0),
        default=1.0,
        help="sample from the most likely tokens with this total probability",
    )
    parser.add_argument(
        "--num_samples", type=within(1, 10**6), default=1, help="texts to generate, with seeds seed, seed + 1, ..."
    )
    parser.add_argument("--seed", type=within(0, 2**63 - 1), default=0, help="seed of the first sample")
    arguments = parser.parse_args()
    if 0 < arguments.temperature < 1e-3:  # dividing the logits by it would overflow
        raise UserError(f"--temperature: {arguments.temperature} is out of range; allowed: 0, or 0.001 to 1000000.")
    if arguments.prompt and arguments.message is not None:
        raise UserError("--prompt and --message are both set; name one of them.")
    option = "--prompt" if arguments.message is None else "--message"
    text = arguments.prompt if arguments.message is None else arguments.message
    if text != text.encode("utf-8", "ignore").decode():
        raise UserError(f"{option}: not UTF-8; convert it, or set the terminal to UTF-8.")

    from hfgolf.evaluate.sample import generate_answer, generate_text
    from hfgolf.publish.load import load_exported
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    model, tokenizer = load_exported(arguments.model)
    generate = generate_text if arguments.message is None else generate_answer
    for number in range(arguments.num_samples):
        sample = generate(
            model,
            tokenizer,
            text,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed + number,
        )
        print(sample if arguments.num_samples == 1 else f"--- sample {number + 1}\n{sample}")


if __name__ == "__main__":
    run_command(main)
