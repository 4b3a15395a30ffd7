"""Watch a run's report in the browser while it trains: python scripts/watch.py runs/small"""

import webbrowser
from pathlib import Path

from hfgolf.command_line import run_command
from hfgolf.script_options import ScriptParser, within


def main() -> None:
    parser = ScriptParser(__doc__)
    parser.add_argument("run", type=Path, help="run folder, such as runs/small")
    parser.add_argument(
        "--port", type=within(0, 65535), default=0, help="on the loopback address (default: any free port)"
    )
    parser.add_argument("--no_browser", action="store_true", help="print the address and open nothing")
    arguments = parser.parse_args()

    from hfgolf.tools.watch import address, build_server

    with build_server(arguments.run, arguments.port) as server:
        print(f"watching {arguments.run} at {address(server)} (Ctrl-C ends it, and not the run)", flush=True)
        if not arguments.no_browser:
            webbrowser.open(address(server))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    run_command(main)
