"""Reading what `areal-agent train` is given: a script that defines an agent, or a YAML file that names one.

A script defines `agent` and `reward`, and optionally `dataset`, `eval_dataset` and `model` (each a value
or a function without arguments, called only when it is needed) and `config`. A YAML file holds settings
as areal.yaml does, and `agent: path.py:name`, `reward: path.py:name`, `dataset: ...`, `eval_dataset: ...`;
its paths are relative to the file itself.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_agent.agents import Command
from areal_agent.config import read_mapping
from areal_agent.errors import ConfigError
from areal_agent.settings import JOB_KEYS, as_mapping

YAML = (".yaml", ".yml", ".json")


class Job:
    """What to run, with its optional parts made on demand.

    Attributes:
        path: the script or YAML file.
        config: settings given by it, to be laid over areal.yaml.
    """

    def __init__(
        self, path: Path, parts: Mapping[str, Any], config: Mapping[str, Any], *, needs_agent: bool = True
    ) -> None:
        self.path = path
        self.config = dict(config)
        self._parts = parts
        if needs_agent and parts.get("agent") is None:
            raise ConfigError(f"{path} defines no `agent`; write `async def agent(task): ...` in it")

    @property
    def agent(self) -> Any:
        """None where the job needs none."""
        return self._parts.get("agent")

    @property
    def reward(self) -> Any:
        """Raises ConfigError where there is none."""
        if "reward" not in self._parts:
            raise ConfigError(
                f"{self.path} defines no `reward`; write `def reward(task, result): ...` in it, or `reward = None` "
                "when the agent posts its rewards itself"
            )
        return self._parts["reward"]

    def part(self, name: str) -> Any:
        """`dataset`, `eval_dataset` or `model`, made now; None where not defined."""
        value = self._parts.get(name)
        return value() if callable(value) else value


def load(path: str | Path, *, needs_agent: bool = True) -> Job:
    """Raises ConfigError when it cannot be read, fails to run, or lacks an agent that is needed."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; give a script that defines `agent` and `reward`, or a YAML file"
        )
    path = path.resolve()
    if path.suffix == ".py":
        module = run_script(path)
        parts = {k: getattr(module, k) for k in ("agent", "reward", "dataset", "eval_dataset", "model")
                 if hasattr(module, k)}  # fmt: skip
        return Job(path, parts, as_mapping(getattr(module, "config", None)), needs_agent=needs_agent)
    if path.suffix in YAML:
        values = read_mapping(path)
        parts = {k: _named(values.pop(k), path, k) for k in JOB_KEYS if k in values}
        if isinstance(values.get("model"), str) and values["model"]:
            values["model"] = str(path.parent / values["model"])
        return Job(path, parts, values, needs_agent=needs_agent)
    raise ConfigError(f"{path} is neither a .py script nor a .yaml file")


def run_script(path: Path) -> ModuleType:
    """Import a file by its path, its folder importable as it is for `python path`. Raises ConfigError."""
    name = f"areal_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up there
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        del sys.modules[name]
        frames = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename) == path]
        line = e.lineno if isinstance(e, SyntaxError) else frames[-1].lineno if frames else None
        where = f"{path}, line {line}" if line else str(path)
        raise ConfigError(f"{where}: {type(e).__name__}: {e}") from e
    return module


def _named(value: Any, origin: Path, key: str) -> Any:
    """ "path.py:name" -> the object; {command: ...} -> Command; a path -> relative to the YAML file."""
    if isinstance(value, Mapping) and key == "agent":
        unknown = set(value) - {"command", "env", "cwd"}
        if unknown or "command" not in value:
            raise ConfigError(
                f"{origin}: agent: {dict(value)!r} must hold `command`, and may hold `env` and `cwd`"
            )
        return Command(value["command"], env=value.get("env"), cwd=value.get("cwd") or origin.parent)
    if not isinstance(value, str):
        return value
    file, colon, name = value.rpartition(":")
    if colon and file.endswith(".py"):
        module = run_script((origin.parent / file).resolve())
        if not hasattr(module, name):
            raise ConfigError(f"{origin}: {key}: {value}: {file} defines no {name}")
        return getattr(module, name)
    if key in ("agent", "reward"):
        raise ConfigError(f"{origin}: {key}: {value!r} must look like path.py:name")
    return origin.parent / value
