"""`areal-agent fleet`: look at a running gateway's engines, and let them join, drain and leave.

Invariant: the gateway is found through its run folder, which holds its address and its key; nothing here
guesses either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from areal_agent.errors import ConfigError, GatewayError
from areal_agent.rundir import RunDir

commands = typer.Typer(
    help="The engines of a running gateway: list them, let one join, drain or leave.", no_args_is_help=True
)

ANSWER_S = 30.0
JOIN_S = 600.0
"""An engine that is still loading its model is waited for, as long as fleet.start_timeout_s says."""

RunDirOpt = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="Folder of the run; default: the newest in runs/ with a gateway."
    ),
]
EngineArg = Annotated[
    str, typer.Argument(metavar="ENGINE", help="Its id, as `list` shows it, or its address.")
]


@commands.command("list")
def show(run_dir: RunDirOpt = None) -> None:
    """Show every engine, its state and what it is doing."""
    fleet = _ask(run_dir, "GET", "", None, ANSWER_S)
    table = Table("engine", "state", "version", "calls", "driver", "address", "why", box=None)
    for e in fleet["engines"]:
        row = (e["id"], e["state"], e["version"], e["running"], e["driver"], e["url"], e["reason"])
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(width=None if Console().is_terminal else 160).print(table)
    typer.echo(f"fleet: {fleet['state']}, version {fleet['version']}")


@commands.command()
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of a vLLM server, http://HOST:PORT.")],
    run_dir: RunDirOpt = None,
) -> None:
    """Attach an engine that somebody runs, or take a drained one back. It serves once it has the weights."""
    _tell(_ask(run_dir, "POST", "/join", {"url": url}, JOIN_S))


@commands.command()
def drain(engine: EngineArg, run_dir: RunDirOpt = None) -> None:
    """Give ENGINE no new calls; those that it has go on to their end."""
    _tell(_ask(run_dir, "POST", "/drain", {"engine": engine}, ANSWER_S))


@commands.command()
def leave(engine: EngineArg, run_dir: RunDirOpt = None) -> None:
    """Take ENGINE out for good; calls that it still has go on elsewhere."""
    _tell(_ask(run_dir, "POST", "/leave", {"engine": engine}, ANSWER_S))


def _tell(engine: dict[str, Any]) -> None:
    why = f" ({engine['reason']})" if engine["reason"] else ""
    typer.echo(f"{engine['id']} is {engine['state']}{why}, {engine['running']} calls running")


def _ask(run_dir: Path | None, verb: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
    """One call to /admin/fleet. Raises ConfigError: no gateway there; GatewayError: it refused."""
    run = RunDir(run_dir) if run_dir is not None else _newest()
    info = run.read("gateway.json")
    if info is None:
        raise ConfigError(f"no gateway runs in {run.path}: it holds no gateway.json")
    headers = {"authorization": f"Bearer {run.admin_key()}"}
    url = f"{info['url']}/admin/fleet{path}"
    try:
        response = httpx.request(verb, url, json=body, headers=headers, timeout=timeout_s, trust_env=False)
    except httpx.HTTPError as e:
        raise GatewayError(f"the gateway at {info['url']} does not answer: {e!r}") from e
    answer = response.json()
    if response.status_code != 200:
        raise GatewayError(
            answer["error"]["message"], status=response.status_code, code=answer["error"]["code"]
        )
    return answer


def _newest() -> RunDir:
    found = sorted(Path("runs").glob("*/gateway.json"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ConfigError("no gateway runs in a folder under runs/; give --run-dir")
    return RunDir(found[-1].parent)
