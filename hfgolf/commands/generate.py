"""Generate text with a trained model: hfgolf generate runs/small "def main"

A prompt - is all of standard input, without its last line break.
"""

import sys

from hfgolf.commands.options import (
    SAMPLING,
    Answer,
    ScriptParser,
    add_model,
    add_sampling,
    bounded,
    read_utf8,
    take_words,
)
from hfgolf.run.find_model import find_model
from hfgolf.system.errors import UserError


def main() -> Answer:
    parser = ScriptParser(__doc__)
    add_model(parser, "PROMPT")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start a new document; -: standard input")
    parser.add_argument("--message", help="message to a chat model (data.messages_column), instead of --prompt")
    parser.add_argument("--num_samples", **bounded(1, 10**6, "texts to generate", 1))
    add_sampling(parser)
    arguments = parser.parse_intermixed_args()
    rest = take_words(arguments, "prompt")
    if rest:
        raise UserError(f"{rest[0]}: a second prompt; put a prompt of several words in quotes.")
    if arguments.prompt and arguments.message is not None:
        raise UserError("--prompt and --message are both set; name one of them.")
    option = "--prompt" if arguments.message is None else "--message"
    text = read_utf8(option, arguments.prompt if arguments.message is None else arguments.message)
    find_model(arguments.model)
    if text == "-":
        text = read_utf8("standard input", sys.stdin.buffer.read()).removesuffix("\n")

    from hfgolf.evaluate.sample import generate_answer, generate_text
    from hfgolf.publish.load import load_exported
    from hfgolf.train.console import quiet_libraries, shown

    quiet_libraries()
    model, tokenizer = load_exported(arguments.model)
    if model.name_or_path != arguments.model:
        print(f"model: {model.name_or_path}", file=sys.stderr)
    generate = generate_text if arguments.message is None else generate_answer
    samples = []
    for number in range(arguments.num_samples):
        options = {name: getattr(arguments, name) for name in SAMPLING} | {"seed": arguments.seed + number}
        samples.append(generate(model, tokenizer, text, **options))
        sample = shown(samples[-1]) if sys.stdout.isatty() else samples[-1]
        print(sample if arguments.num_samples == 1 else f"--- sample {number + 1}\n{sample}")
    return Answer({"model": model.name_or_path, "samples": samples})
