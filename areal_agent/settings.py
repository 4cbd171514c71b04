"""Where a run's settings come from: the call, then the config it names, then areal.yaml, then defaults."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from areal_agent.config import RunConfig, merge, read_mapping
from areal_agent.errors import ConfigError

FILE = "areal.yaml"

JOB_KEYS = ("agent", "reward", "dataset", "eval_dataset")
"""What a YAML file may hold beside settings when it is a job (see script.py): no settings themselves."""

ConfigLike = RunConfig | Mapping[str, Any] | str | Path | None


def resolve(config: ConfigLike = None, *, script: Path | None = None, **passed: Any) -> RunConfig:
    """One RunConfig from all sources.

    Args:
        config: a RunConfig (what was set in it), a mapping, or a path to a YAML file.
        script: the file whose folder may hold areal.yaml; by default the program that runs.
        passed: settings of the top level given by the caller; None means not passed.

    Raises:
        ConfigError: it names each wrong setting, its value and what is allowed.
    """
    values: dict[str, Any] = {}
    script = script or main_script()
    beside = script.parent / FILE if script else None
    if script and beside and beside.is_file() and script.resolve() != beside.resolve():
        values = {key: value for key, value in read_mapping(beside).items() if key not in JOB_KEYS}
    values = merge(values, as_mapping(config))
    values = merge(values, {key: value for key, value in passed.items() if value is not None})
    if not values.get("name") and script is not None:
        values["name"] = script.stem
    return RunConfig.parse(values)


def as_mapping(config: ConfigLike) -> dict[str, Any]:
    """Only what was set, so that it can be laid over other sources. Raises ConfigError."""
    if config is None:
        return {}
    if isinstance(config, RunConfig):
        return config.model_dump(exclude_unset=True)
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, Path)):
        return read_mapping(config)
    raise ConfigError(
        f"config is a {type(config).__name__}; it must be a RunConfig, a mapping, or a path to a YAML file"
    )


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """["trainer.steps=10", ...] -> {"trainer": {"steps": 10}}; values are read as YAML. Raises ConfigError."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {assignment}: it must look like trainer.steps=10")
        try:
            value: Any = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        for part in reversed(name.strip().split(".")):
            value = {part: value}
        values = merge(values, value)
    return values


def main_script() -> Path | None:
    """The file of the program that runs, if it is one."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else None


def describe() -> list[tuple[str, str, str]]:
    """(name, default, help) of every setting, in the order of the config file.

    Defaults as a run without settings has them, the recipe's parts included.
    """
    rows: list[tuple[str, str, str]] = []

    def walk(section: BaseModel, prefix: str) -> None:
        for name, info in type(section).model_fields.items():
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                walk(value, f"{prefix}{name}.")
            else:
                rows.append((f"{prefix}{name}", yaml_value(value), info.description or ""))

    walk(RunConfig(), "")
    return rows


def yaml_value(value: Any) -> str:
    """A value as it stands in YAML on one line."""
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
