"""Write text with a trained model: python scripts/generate.py --model runs/small/model --prompt "def main" """

import argparse

from hfgolf.command_line import run_command
from hfgolf.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of an exported model (runs/NAME/model) or a Hub name")
    parser.add_argument("--prompt", default="", help="text to continue; empty starts a document")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="tokens to write at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top_k", type=int, default=50, help="sample among so many likeliest tokens; 0 is all")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample among the likeliest tokens of this total mass")
    parser.add_argument("--num_samples", type=int, default=1, help="texts to write, with seeds seed, seed + 1, ...")
    parser.add_argument("--seed", type=int, default=0, help="of the first sample")
    arguments = parser.parse_args()
    _require("max_new_tokens", arguments.max_new_tokens, arguments.max_new_tokens >= 1, "1 or more")
    heat = arguments.temperature
    _require("temperature", heat, heat == 0 or 1e-3 <= heat <= 1e6, "0, or 0.001 to 1000000")
    _require("top_k", arguments.top_k, arguments.top_k >= 0, "0 or more")
    _require("top_p", arguments.top_p, 0 < arguments.top_p <= 1, "above 0, up to 1")
    _require("num_samples", arguments.num_samples, arguments.num_samples >= 1, "1 or more")
    last_seed = arguments.seed + arguments.num_samples - 1
    _require("seed", arguments.seed, 0 <= arguments.seed <= last_seed < 2**63, "0 to 9223372036854775807")
    if arguments.prompt != arguments.prompt.encode("utf-8", "ignore").decode():
        raise UserError("--prompt: is not UTF-8; convert it, or set the terminal to UTF-8.")

    from hfgolf.evaluate.sample import generate_text
    from hfgolf.publish.load import load_exported
    from hfgolf.train.console import quiet_libraries

    quiet_libraries()
    model, tokenizer = load_exported(arguments.model)
    for number in range(arguments.num_samples):
        text = generate_text(
            model,
            tokenizer,
            arguments.prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed + number,
        )
        print(text if arguments.num_samples == 1 else f"--- sample {number + 1}\n{text}")


def _require(option: str, value: float, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise UserError(f"--{option}: {value} is out of range; allowed: {allowed}.")


if __name__ == "__main__":
    run_command(main)
