"""How trackers differ: how each names a run and continues it, where its files go, and how it takes text.

Owns everything that is said to one tracker only. The classes of accelerate do the rest.

Trackers that need an account fall back to files that can be uploaded later. Files go to the run's folder, with two
exceptions: trackio has one database for all runs, which `trackio show` reads, and clearml has a cache of its own.
"""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hfgolf.system.redact import redact_values
from hfgolf.system.wording import one_line

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from hfgolf.config.sections import RunConfig

logger = logging.getLogger(__name__)

WANDB_TIMEOUT_SECONDS = 20  # without a network, wandb's own default would block for 90
_WITH_ACCOUNTS = ("wandb", "swanlab", "comet_ml", "clearml")


def start_tracker(kind: str, config: RunConfig, folder: Path, run_id: str, *, resumes: bool) -> GeneralTracker:
    """Start a tracker, offline if it needs an account and there is none, and give it the config.

    run_id: what a resumed run is found again by, in addition to its name. Raises whatever the tracker raises.
    """
    is_offline = config.track.offline
    obstacle = _wandb_obstacle() if kind == "wandb" and not is_offline else None
    if not obstacle:
        try:
            return _started(kind, config, folder, run_id, resumes, is_offline)
        except Exception as error:  # no account or no network, and each tracker has its own error for it
            if is_offline or kind not in _WITH_ACCOUNTS:
                raise
            obstacle = f"it could not be reached: {one_line(error)}"
    logger.warning("%s: offline, because %s", kind, obstacle)
    return _started(kind, config, folder, run_id, resumes, True)


def _started(
    kind: str, config: RunConfig, folder: Path, run_id: str, resumes: bool, is_offline: bool
) -> GeneralTracker:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    public = redact_values(config.flat())
    name, project = public["run.name"], public["track.project"]
    make: Any = LOGGER_TYPE_TO_CLASS[kind]
    place = {"logging_dir": str(folder)} if make.requires_logging_directory else {}
    settings = _settings(kind, project, name, folder, run_id, resumes, is_offline)
    tracker: Any = make(project, **place, **settings)
    tracker.start()
    if not settings.get("run_id"):  # mlflow refuses other values for the run that it continues, even of train.resume
        tracker.store_init_configuration(
            {key: value if isinstance(value, int | float | str) else str(value) for key, value in public.items()}
        )
    if kind == "wandb":
        tracker.tracker.define_metric("*", step_metric="step")
    if kind == "aim":  # accelerate takes the project for the name
        tracker.tracker.name, tracker.tracker.experiment = name, project
    return tracker


def _settings(
    kind: str, project: str, name: str, folder: Path, run_id: str, resumes: bool, is_offline: bool
) -> dict[str, Any]:
    """Return the arguments of a tracker. Nothing may record the command line or a diff, which can hold secrets."""
    match kind:
        case "wandb":
            import wandb

            mode = "offline" if is_offline else os.environ.get("WANDB_MODE", "online")
            settings = wandb.Settings(
                init_timeout=WANDB_TIMEOUT_SECONDS, silent=mode == "offline", x_disable_meta=True, disable_git=True
            )
            place = {"mode": mode, "dir": str(folder), "id": run_id, "resume": "allow"}
            return {"name": name, **place, "settings": settings}
        case "trackio":
            return {"name": name, "resume": "allow" if resumes else "never", "embed": False}
        case "mlflow":
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it leaves a file in the home folder
            if "MLFLOW_TRACKING_URI" not in os.environ:
                import mlflow

                mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
            before = _mlflow_id(project, run_id) if resumes else None
            tags = {"hfgolf.id": run_id}
            return {"run_name": name, "run_id": before, "tags": tags, "logging_dir": str(folder / "mlflow")}
        case "swanlab":
            import swanlab

            mode = "offline" if is_offline else os.environ.get("SWANLAB_MODE", "online")
            place = {"log_dir": str(folder / "swanlab"), "mode": mode, "id": run_id, "resume": "allow"}
            unwanted: Any = {"runtime": False, "git": False}
            # interactive: without an account it would ask for a key on the terminal, and wait
            return {"name": name, **place, "settings": swanlab.Settings(probe=unwanted, interactive=False)}
        case "comet_ml":
            from comet_ml import ExperimentConfig

            options = ExperimentConfig(
                name=name,
                offline_directory=str(folder / "comet_ml"),
                log_code=False,
                log_git_metadata=False,
                log_git_patch=False,
                log_env_details=False,
                parse_args=False,
                auto_output_logging="",
            )
            return {"online": not is_offline, "experiment_config": options}
        case "clearml":
            from clearml import Task

            Task.set_offline(is_offline)
            Task._store_diff = False  # its public switch is a line in the user's ~/clearml.conf
            unwanted = {f"auto_connect_{what}": False for what in ("arg_parser", "frameworks", "streams")}
            return {"task_name": name, "reuse_last_task_id": False, **unwanted}
        case "dvclive":
            place = {"dir": str(folder / "dvclive"), "dvcyaml": str(folder / "dvclive" / "dvc.yaml")}
            return {**place, "exp_name": name, "resume": resumes}
        case "aim":
            return {"capture_terminal_logs": False}
    return {}


def _mlflow_id(project: str, run_id: str) -> str | None:
    """Return mlflow's own ID of the run that has this tag, None if there is none."""
    import mlflow

    query = f"tags.`hfgolf.id` = '{run_id}'"
    runs: Any = mlflow.search_runs(experiment_names=[project], filter_string=query, output_format="list")
    return str(runs[0].info.run_id) if runs else None


def send_values(tracker: GeneralTracker, values: dict[str, Any], step: int) -> None:
    """Send numbers, or text under names that begin with event/."""
    if tracker.name == "wandb":  # wandb's own step cannot decrease, but a rollback does
        tracker.log(values | {"step": step})
        return
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    for name, text in texts.items():
        _send_text(tracker, name, text, step)
    if len(texts) < len(values):
        tracker.log({name: value for name, value in values.items() if name not in texts}, step=step)


def _send_text(tracker: GeneralTracker, name: str, text: str, step: int) -> None:
    raw: Any = tracker.tracker
    match tracker.name:
        case "trackio":
            import trackio

            tracker.log({name: trackio.Markdown(f"```text\n{text}\n```")}, step=step)
        case "mlflow":
            import mlflow

            mlflow.log_text(text, f"{name}/{step:06d}_{uuid.uuid4().hex[:4]}.txt")  # one step may have two such events
        case "swanlab":
            import swanlab

            tracker.log({name: swanlab.Text(text)}, step=step)
        case "comet_ml":
            raw.log_text(text, step=step, metadata={"event": name})
        case "clearml":
            raw.get_logger().report_text(f"step {step}, {name}: {text}", print_console=False)
        case "aim":
            import aim

            raw.track(aim.Text(text), name=name, step=step)
        case _:
            tracker.log({name: text}, step=step)


def attach_file(tracker: GeneralTracker, file: Path, kind: str) -> None:
    """Upload a file of the run, if the tracker stores files."""
    raw: Any = tracker.tracker
    if tracker.name == "wandb":
        raw.log_artifact(str(file), f"{kind}-{raw.id}", kind)
    elif tracker.name == "mlflow":
        tracker.log_artifact(str(file), kind)


def end_wandb() -> None:
    """Kill wandb's processes, which would delay the exit; metrics.jsonl has what they did not upload."""
    import wandb

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name().startswith("wandb"):
                process.kill()
    with suppress(Exception, SystemExit):  # its processes are gone, and it wants to exit with their status
        wandb.teardown()


def _wandb_obstacle() -> str | None:
    """Return why a run cannot be sent to wandb now; None if it can, or if it shall not."""
    import wandb

    if os.environ.get("WANDB_MODE", "online") != "online":
        return None
    try:
        return None if wandb.login(prompt=False) else "you are not logged in (`wandb login`)"
    except Exception as error:  # it checks the key over the network, and can fail with many exceptions
        return f"it could not be reached: {one_line(error)}"
