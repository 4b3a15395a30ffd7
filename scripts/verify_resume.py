"""Prove that a run survives kill -9 on this machine: python scripts/verify_resume.py --config configs/small.yaml

Trains a few steps straight, then again with kills at random moments, also inside saves, and compares sample hashes,
losses, weights, optimizer and random states. Exit status 0: equal; 1: different; 2: a run failed.
"""

from pathlib import Path

from hfgolf.command_line import load_config, run_command
from hfgolf.errors import UserError
from hfgolf.script_options import ScriptParser, within


def main() -> int:
    parser = ScriptParser(
        __doc__,
        "Also takes train.py's options, for both runs: --config FILE --section.key value. This script sets\n"
        "their length, how often they log, evaluate and save, and their (temporary) folder.",
    )
    parser.add_argument("--steps", type=within(1, 10**9), default=30, help="optimizer steps of each run (30)")
    parser.add_argument(
        "--kills", type=within(0, 10**6), default=4, help="number of kills; every second one aims at a save (4)"
    )
    parser.add_argument(
        "--kill_seed", type=within(0, 2**63 - 1), default=0, help="seed of the moments of the kills (0)"
    )
    parser.add_argument(
        "--num_processes", type=within(1, 1024), default=1, help="processes on this machine, one per GPU (1)"
    )
    arguments, run_options = parser.parse_known_args()
    if arguments.steps <= arguments.kills:
        raise UserError(f"--steps: {arguments.steps} is out of range; allowed: more than --kills {arguments.kills}.")
    resolved = load_config([*run_options, f"--train.max_steps={arguments.steps}"])

    from hfgolf.tools.verify_resume import KillPlan, verify_resume
    from hfgolf.train.console import show_log

    show_log(is_main_process=True)
    plan = KillPlan(**vars(arguments))
    return 0 if verify_resume(Path(__file__).with_name("train.py"), run_options, resolved, plan) else 1


if __name__ == "__main__":
    run_command(main)
