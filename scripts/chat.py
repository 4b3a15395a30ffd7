"""Talk with a model in the terminal: python scripts/chat.py runs/small

A base model continues what you type; a chat model (data.messages_column) answers it and remembers the conversation.
/temperature 0.5 and the like change the settings, and /help lists them. If standard input is no terminal, each of its
lines is a prompt, and only the answers are printed:

    python scripts/chat.py runs/small < prompts.txt
"""

from hfgolf.command_line import run_command
from hfgolf.errors import UserError
from hfgolf.script_options import SAMPLING, ScriptParser, add_model, add_sampling, take_words


def main() -> None:
    parser = ScriptParser(__doc__)
    add_model(parser)
    add_sampling(parser)
    arguments = parser.parse_intermixed_args()
    if rest := take_words(arguments):
        raise UserError(f"{rest[0]}: chat takes a model only; type the prompts, or pipe them in.")

    from hfgolf.tools.chat import chat

    chat(arguments.model, {name: getattr(arguments, name) for name in SAMPLING})


if __name__ == "__main__":
    run_command(main)
