"""train(), evaluate(), rollout(): the story of a run on one screen.

Each has an async twin (`atrain`, ...) for callers that are in an event loop already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from areal_agent import checks, online
from areal_agent import dataset as data
from areal_agent.controller import EvalResult, Group
from areal_agent.errors import ArealError, ConfigError
from areal_agent.launch.machine import plan_engines
from areal_agent.panel import report
from areal_agent.run import Run
from areal_agent.rundir import RunDir
from areal_agent.settings import ConfigLike, resolve

T = TypeVar("T")

Reward = Callable[..., Any]


@dataclass(frozen=True)
class TrainResult:
    """What a training run came to.

    Attributes:
        steps: optimiser steps taken; the final policy version.
        reward_before, reward_after: mean greedy reward on held-out tasks; None without any. Tasks without a
            reward are left out: `summary["eval_after"]["missing"]` says how many.
        checkpoint: Hugging Face folder of the final policy.
        run_dir: everything else, see rundir.py.
        summary: all of summary.json.
    """

    steps: int | None
    reward_before: float | None
    reward_after: float | None
    checkpoint: Path | None
    run_dir: Path
    summary: dict[str, Any] = field(repr=False, default_factory=dict)


def train(
    agent: Any = None,
    reward: Reward | None = None,
    *,
    dataset: Any = None,
    eval_dataset: Any = None,
    model: str | Path | None = None,
    config: ConfigLike = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
) -> TrainResult:
    """Train the policy behind `agent` on `dataset` with what `reward` says of its results.

    Args:
        agent: agent(task) sync or async, which may also take session=, base_url=, api_key= or http_client=;
            an object with `async def run(self, data, **extra_kwargs)`; or a Command. None: the run is online,
            see below.
        reward: reward(task, result) -> float, int, bool or None (missing), sync or async, which may also take
            session= or trajectory=. None: rewards come from the agent itself over POST /v1/rewards.
        dataset: list of JSON objects, or a path to .jsonl, .json or .parquet. None in an online run.
        eval_dataset: held-out tasks, likewise; or a fraction of `dataset` to split off; or None.
        model: Hugging Face folder the policy starts from.
        config: RunConfig, mapping, or path; what is not passed comes from areal.yaml next to the script.
        run_dir: where the run is kept; by default runs/NAME-TIME.
        resume: folder of an interrupted run to go on with, under the settings it has; then neither model,
            config nor run_dir is given. Agent, reward and data have to be those it was started with.

    Online (without an agent, or with `online.enabled`) somebody's service is the agent: it calls the gateway at
    the URL that is printed, under the key in RUN_DIR/project.key, and posts rewards to /v1/rewards; a batch
    is trained whenever enough cohorts of its conversations are whole, however long that takes. The run ends
    after `trainer.steps` or at Ctrl-C, in both cases with a checkpoint. An agent, where one is given, is only
    evaluated, on `eval_dataset`.

    Raises:
        ArealError: one of its kinds, as a sentence, when the input cannot be used or the run failed.
    """
    return _run(
        "train",
        atrain(
            agent,
            reward,
            dataset=dataset,
            eval_dataset=eval_dataset,
            model=model,
            config=config,
            run_dir=run_dir,
            resume=resume,
        ),
    )


async def atrain(
    agent: Any = None,
    reward: Reward | None = None,
    *,
    dataset: Any = None,
    eval_dataset: Any = None,
    model: str | Path | None = None,
    config: ConfigLike = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
) -> TrainResult:
    """`train` for a caller inside an event loop."""
    folder = None if resume is None else RunDir(resume)
    if folder is None:
        settings = resolve(config, model=_text(model), run_dir=_text(run_dir))
    else:
        if model or config or run_dir:
            raise ConfigError(
                f"{folder.path} is resumed with its own settings; give no model, config or run_dir"
            )
        settings = folder.read_config()
        folder.check_resumable()
        if agent is None and not settings.online.enabled:
            raise ConfigError(f"{folder.path} is no online run; resume it with its agent, reward and dataset")
    if online.settle(settings, agent, reward, dataset, eval_dataset):
        training, held_out = [], [] if eval_dataset is None else data.load(eval_dataset, "eval_dataset")
        remarks = []
    else:
        training, held_out = data.load_both(dataset, eval_dataset, settings.rollout.seed)
        remarks = list(data.remarks(training, held_out))
    checks.before_start(settings, trainer=True)
    settings.fleet.engines, why = plan_engines(settings)

    async with Run(settings, agent, reward, folder=folder) as run:
        run.remark([f"engines: {settings.fleet.engines} ({why})", *remarks])
        if folder is None:
            before = await run.evaluate_start(held_out[: settings.eval.tasks])
            await run.start_trainer()
        else:
            await run.resume_trainer()
            before = await run.evaluate_start(held_out[: settings.eval.tasks])
        trainer = await run.train(training, held_out)
        after = await run.evaluate(held_out[: settings.eval.tasks], "after training")
        summary = await run.summarise(before, after, trainer)
    print(report(summary))
    checkpoint = summary["checkpoint"]
    return TrainResult(
        steps=summary["steps"],
        reward_before=summary["reward_before"],
        reward_after=summary["reward_after"],
        checkpoint=Path(checkpoint) if checkpoint else None,
        run_dir=run.folder.path,
        summary=summary,
    )


def evaluate(
    agent: Any,
    reward: Reward | None,
    *,
    dataset: Any,
    model: str | Path | None = None,
    config: ConfigLike = None,
    run_dir: str | Path | None = None,
) -> EvalResult:
    """Score `agent` on every task once, greedily, without training. Arguments as of `train`."""
    return _run(
        "evaluate",
        aevaluate(agent, reward, dataset=dataset, model=model, config=config, run_dir=run_dir),
    )


async def aevaluate(
    agent: Any,
    reward: Reward | None,
    *,
    dataset: Any,
    model: str | Path | None = None,
    config: ConfigLike = None,
    run_dir: str | Path | None = None,
) -> EvalResult:
    """`evaluate` for a caller inside an event loop."""
    settings = resolve(config, model=_text(model), run_dir=_text(run_dir))
    items = data.load(dataset)
    checks.before_start(settings, trainer=False)
    settings.fleet.engines, why = plan_engines(settings)

    async with Run(settings, agent, reward) as run:
        run.remark([f"engines: {settings.fleet.engines} ({why})"])
        result = await run.evaluate(items, "the model")
    assert result is not None  # load() refuses an empty data set
    return result


def rollout(
    agent: Any,
    reward: Reward | None,
    *,
    dataset: Any,
    model: str | Path | None = None,
    group_size: int | None = None,
    config: ConfigLike = None,
    run_dir: str | Path | None = None,
) -> list[Group]:
    """Run `agent` on every task, sampled as in training, `group_size` times each; train nothing.

    The calls are in the run folder's ledger.sqlite. Arguments as of `train`.
    """
    return _run(
        "rollout",
        arollout(
            agent,
            reward,
            dataset=dataset,
            model=model,
            group_size=group_size,
            config=config,
            run_dir=run_dir,
        ),
    )


async def arollout(
    agent: Any,
    reward: Reward | None,
    *,
    dataset: Any,
    model: str | Path | None = None,
    group_size: int | None = None,
    config: ConfigLike = None,
    run_dir: str | Path | None = None,
) -> list[Group]:
    """`rollout` for a caller inside an event loop."""
    settings = resolve(config, model=_text(model), run_dir=_text(run_dir))
    items = data.load(dataset)
    checks.before_start(settings, trainer=False)
    settings.fleet.engines, why = plan_engines(settings)

    async with Run(settings, agent, reward) as run:
        run.remark([f"engines: {settings.fleet.engines} ({why})"])
        return await run.rollout(items, group_size or settings.rollout.group_size)


def _run(name: str, story: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(story)
    story.close()
    raise ArealError(
        f"areal_agent.{name}() was called inside a running event loop (a notebook, or an async function); "
        f"use `await areal_agent.a{name}(...)` there"
    )


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)
