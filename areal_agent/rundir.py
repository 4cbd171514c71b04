"""The run folder: every file of a run has one place, and a reader never sees half of one.

config.json admin.key gateway.json trainer.json eval_before.json summary.json metrics.jsonl evals.jsonl
ledger.sqlite checkpoints/ state/ logs/ tensorboard/; online also project.key, and `stop` once it is asked to end
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_agent.config import RunConfig
from areal_agent.errors import ConfigError
from areal_agent.keyfile import shared_key

STATE_FILE = "state.json"
"""Of a training state: its version and counters. The folder that holds it is whole."""


class RunDir:
    """Paths of one run. Build with `create` (new, with config and admin key) or `open` (existing)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()

    @classmethod
    def create(cls, config: RunConfig) -> RunDir:
        """Make the folder `config.run_dir`, or runs/NAME-YYYYmmdd-HHMMSS, and write the config and a key.

        Raises:
            ConfigError: the folder cannot be made, or already holds a run.
        """
        try:
            path = Path(config.run_dir) if config.run_dir else _fresh(Path("runs"), config.name)
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path)
            if run.config_path.exists():
                raise ConfigError(f"{path} already holds a run; give another run_dir, or remove it first")
            (run.path / "logs").mkdir(exist_ok=True)
            run.write_config(config.model_copy(update={"run_dir": str(run.path)}))
            run.admin_key()
        except OSError as e:
            raise ConfigError(f"cannot make the run folder {config.run_dir or 'runs/'}: {e}") from e
        return run

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def state_path(self) -> Path:
        """Folder of the training states a run can be resumed from."""
        return self.path / "state"

    @property
    def stop_path(self) -> Path:
        """A file that asks the trainer to end well: after the batch it is at, with a checkpoint."""
        return self.path / "stop"

    def resumable_version(self) -> int:
        """The version of the newest training state; 0 where there is none, which is the model itself."""
        newest = newest_state(self.state_path)
        return version_of(newest) if newest else 0

    def check_resumable(self) -> None:
        """Raises ConfigError where the run has done all its steps; one that was asked to end before can go on."""
        if (summary := self.read("summary.json")) is None:
            return
        if (summary.get("steps") or 0) >= self.read_config().trainer.steps:
            raise ConfigError(
                f"the run in {self.path} has ended after {summary.get('steps')} steps, there is nothing to resume; "
                f"to train on, start a run with the model {summary.get('checkpoint')}"
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other controllers out of the run inside. Raises ConfigError where one is in it already.

        The lock is this process's alone (forked children do not hold it) and ends with it, however it ends.
        """
        with (self.path / "controller.lock").open("w") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"the run in {self.path} still goes on, in another process; stop that one first"
                ) from None
            yield

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def write_config(self, config: RunConfig) -> None:
        write_json(self.config_path, config.model_dump(mode="json"))

    def read_config(self) -> RunConfig:
        """Raises ConfigError when there is none or it does not validate."""
        if not self.config_path.exists():
            raise ConfigError(f"{self.path} holds no config.json, so it is not a run folder")
        return RunConfig.read(self.config_path)

    def admin_key(self) -> str:
        """The run's admin key, made (readable by its owner only) by whoever asks first."""
        return shared_key(self.path / "admin.key")

    def project_key(self) -> str:
        """The key of online mode, made likewise; it makes calls and gives rewards, and opens no admin door."""
        return shared_key(self.path / "project.key", "sk-areal-project-")

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON object such as gateway.json or trainer.json; None while it is not there."""
        try:
            value = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def write(self, name: str, value: dict[str, Any]) -> Path:
        write_json(self.path / name, value)
        return self.path / name


def state_folders(folder: Path) -> list[Path]:
    """The whole training states below `folder`, `step-N` each, oldest first."""
    return sorted((f.parent for f in folder.glob(f"step-*/{STATE_FILE}")), key=version_of)


def newest_state(folder: Path) -> Path | None:
    """The newest whole training state below `folder`; None when there is none."""
    return next(reversed(state_folders(folder)), None)


def version_of(folder: Path) -> int:
    """N of a folder `step-N`."""
    return int(folder.name.rpartition("-")[2])


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    temporary.replace(path)


def _fresh(parent: Path, name: str) -> Path:
    """A folder name not taken; two runs started within one second differ by a suffix."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for n in range(1000):
        path = parent / (stem if n == 0 else f"{stem}-{n}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise ConfigError(f"{parent}/{stem} and 999 like it exist")
