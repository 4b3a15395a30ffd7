"""What accelerate leaves to each tracker: how it names a run and continues it, where its files go, how it takes text.

Trackers that need an account fall back to files that can be uploaded later. Files go to the run's folder, with two
exceptions: trackio has one database for all runs, which `trackio show` reads, and clearml has a cache of its own.
"""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from hfgolf.config.sections import RunConfig
from hfgolf.system.redact import redact
from hfgolf.system.wording import one_line

logger = logging.getLogger(__name__)

WANDB_TIMEOUT_SECONDS = 20  # without a network, wandb's own default would block for 90
_WITH_ACCOUNTS = ("wandb", "swanlab", "comet_ml", "clearml")


def start_tracker(
    kind: str, config: RunConfig, folder: Path, run_id: str, *, resumes: bool, is_offline: bool | None = None
) -> GeneralTracker:
    """Start a tracker, offline if it needs an account and there is none.

    run_id: what a resumed run is found again by, in addition to its name. is_offline: None: as track.offline says.
    Raises whatever the tracker raises.
    """
    is_offline = config.track.offline if is_offline is None else is_offline
    name, project = redact(str(config.run.name)), redact(config.track.project)
    try:
        make: Any = LOGGER_TYPE_TO_CLASS[kind]
        place = {"logging_dir": str(folder)} if make.requires_logging_directory else {}
        settings = _settings(kind, project, name, folder, run_id, resumes, is_offline)
        tracker: GeneralTracker = make(name if kind == "aim" else project, **place, **settings)
        tracker.start()
    except Exception as error:  # no account or no network, and each tracker has its own error for it
        if is_offline or kind not in _WITH_ACCOUNTS:
            raise
        logger.warning("%s: offline (%s)", kind, one_line(error))
        return start_tracker(kind, config, folder, run_id, resumes=resumes, is_offline=True)
    if kind == "wandb":
        tracker.tracker.define_metric("*", step_metric="step")
    return tracker


def store_config(tracker: Any, values: dict[str, Any]) -> None:
    """Give a tracker the config of the run, {"section.key": value}."""
    if tracker.name == "mlflow" and tracker.run_id:
        return  # it refuses other values for the run that it continues, even of train.resume
    plain = {key: value if isinstance(value, int | float | str) else str(value) for key, value in values.items()}
    tracker.store_init_configuration(plain)


def _settings(
    kind: str, project: str, name: str, folder: Path, run_id: str, resumes: bool, is_offline: bool
) -> dict[str, Any]:
    """Return the arguments of a tracker. Nothing may record the command line or a diff, which can hold secrets."""
    match kind:
        case "wandb":
            import wandb

            mode = "offline" if is_offline else os.environ.get("WANDB_MODE", "online")
            if mode == "online" and not wandb.login(prompt=False):
                raise ConnectionError("you are not logged in (`wandb login`)")
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
            return {"experiment": project, "capture_terminal_logs": False}
    return {}


def _mlflow_id(project: str, run_id: str) -> str | None:
    """Return mlflow's own ID of the run that has this tag, None if there is none."""
    import mlflow

    query = f"tags.`hfgolf.id` = '{run_id}'"
    runs: Any = mlflow.search_runs(experiment_names=[project], filter_string=query, output_format="list")
    return str(runs[0].info.run_id) if runs else None


def send(tracker: GeneralTracker, values: dict[str, Any], step: int | None, **options: Any) -> None:
    """Send values at a step, text as what the tracker shows as text. options: for the tracker's own `log`."""
    if tracker.name == "wandb":  # wandb's own step cannot decrease, but a rollback does
        tracker.log(values if step is None else values | {"step": step}, **options)
        return
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    for name, text in texts.items():
        _send_text(tracker, name, text, step)
    if len(texts) < len(values):
        tracker.log({name: value for name, value in values.items() if name not in texts}, step=step, **options)


def _send_text(tracker: GeneralTracker, name: str, text: str, step: int | None) -> None:
    raw: Any = tracker.tracker
    match tracker.name:
        case "trackio":
            import trackio

            tracker.log({name: trackio.Markdown(f"```text\n{text}\n```")}, step=step)
        case "mlflow":
            import mlflow

            unique = uuid.uuid4().hex[:4]  # one step may have two such events
            mlflow.log_text(text, f"{name}/{step or 0:06d}_{unique}.txt")
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


def alert(tracker: GeneralTracker, title: str, text: str, step: int) -> None:
    """Show a warning where the tracker shows those: trackio, on its dashboard and to TRACKIO_WEBHOOK_URL."""
    raw: Any = tracker.tracker
    if tracker.name == "trackio" and hasattr(raw, "alert"):  # older ones have none
        raw.alert(title=title, text=text, step=step)


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
