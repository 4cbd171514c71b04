"""A run's story against a stand-in gateway and trainer: order, files, numbers, and what failing looks like."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import logging
import os
from typing import Any

import pytest
from openai import AsyncOpenAI
from standin_gateway import ADMIN, StandIn, shared_client

import areal_agent
from areal_agent import checks
from areal_agent.config import GatewayConfig, RunConfig
from areal_agent.errors import AgentError, ArealError, ConfigError, GatewayError, RewardError, TrainerError
from areal_agent.launch.machine import plan_engines
from areal_agent.launch.services import Services
from areal_agent.session import GatewayClient

TASKS = [{"q": i} for i in range(8)]
HELD_OUT = [{"q": i} for i in range(100, 106)]
CONFIG = {
    "rollout": {"groups_per_step": 2, "group_size": 2},
    "trainer": {"steps": 3},
    "eval": {"every": 1, "tasks": 4, "tasks_during": 2},
}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def agent(task):
    reply = await shared_client().chat.completions.create(**BODY)
    return json.loads(reply.choices[0].message.content)["version"]


def reward(task, result):
    return result / 3  # the policy is as good as its version


class StandInServices(Services):
    """The processes of a run, without processes."""

    events: list[str]
    last: Any
    trainer_error: ArealError | None = None

    async def start_gateway(self):
        self.standin = await StandIn().start()
        type(self).last = self
        self.events = ["gateway"]
        return GatewayClient(self.standin.url, ADMIN)

    async def start_trainer(self, client):
        self.events.append("trainer")

    async def trainer_finished(self):
        batch = self.config.rollout.groups_per_step
        while self.standin.version < self.config.trainer.steps:
            self.standin.train_step(batch)
            await asyncio.sleep(0.02)
            if self.trainer_error is not None and self.standin.version == 1:
                raise self.trainer_error
        self.events.append("trained")
        return {
            "steps": self.standin.version,
            "tokens_trained": 60,
            "staleness_max": max(self.standin.staleness),
            "logprob_gap_max": 1e-5,
            "checkpoint": str(self.run.path / "checkpoints" / "step-000003"),
        }

    async def stop(self):
        self.events.append("stopped")
        await self.standin.stop()


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def services(monkeypatch):
    class Fresh(StandInServices):
        pass

    monkeypatch.setattr("areal_agent.run.Services", Fresh)
    monkeypatch.setattr("areal_agent.run.POLL_S", 0.005)
    monkeypatch.setattr("areal_agent.launch.machine.available_gib", lambda: 64.0)
    return Fresh


@pytest.fixture
def run(services, model, tmp_path):
    def start(agent=agent, reward=reward, **options):
        options = {"dataset": TASKS, "eval_dataset": HELD_OUT, "config": CONFIG, "model": model} | options
        return areal_agent.train(agent, reward, run_dir=tmp_path / "run", **options)

    return start


def test_the_story_ends_with_a_summary_and_leaves_nothing_changed(run, services, tmp_path, capsys):
    environment = dict(os.environ)
    result = run()
    assert services.last.events == ["gateway", "trainer", "trained", "stopped"]
    assert (result.steps, result.reward_before, result.reward_after) == (3, 0.0, 1.0)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == json.loads(json.dumps(result.summary))
    wanted = (
        "reward_before reward_after steps final_version tokens_trained wall_s staleness_max logprob_gap_max"
    )
    wanted += " multi_version_calls calls_total calls_incomplete checkpoint"
    assert all(summary[name] is not None for name in wanted.split())
    assert summary["final_version"] == 3
    assert summary["staleness_max"] <= 1
    assert summary["eval_after"]["tasks"] == 4
    assert dict(os.environ) == environment
    assert logging.getLogger("areal_agent").handlers == []
    out = capsys.readouterr().out
    assert "step 3/3" in out
    assert "0.000 -> 1.000" in out
    assert str(tmp_path / "run") in out


def test_an_agent_whose_calls_are_all_constrained_is_told_so(run, monkeypatch, capsys):
    monkeypatch.setattr(StandIn, "state", "constrained")
    with pytest.raises(AgentError, match="nothing to train on: every call of a whole group was constrained"):
        run(
            reward=lambda task, result: None,
            config=CONFIG | {"rollout": CONFIG["rollout"] | {"max_failures": 4}},
        )
    assert capsys.readouterr().out.count("such calls are never trained") == 1


def test_the_run_folder_holds_config_key_metrics_and_evals(run, tmp_path):
    run()
    folder = tmp_path / "run"
    config = RunConfig.read(folder / "config.json")
    assert config.trainer.steps == 3
    assert config.fleet.engines == 2, "auto is resolved before anything starts"
    assert (folder / "admin.key").stat().st_mode & 0o777 == 0o600
    assert (folder / "admin.key").read_text() not in (folder / "config.json").read_text()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "groups" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["source"] == "controller" for line in lines)
    evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    assert [e["when"] for e in evals].count("before training") == 4
    assert [e["when"] for e in evals].count("after training") == 4
    assert any(e["when"] == "during training" for e in evals)
    assert any((folder / "tensorboard" / "controller").iterdir())


def test_synchronous_training_works(run):
    result = run(config=CONFIG | {"rollout": {"groups_per_step": 2, "group_size": 2, "max_staleness": 0}})
    assert result.summary["staleness_max"] == 0


def test_held_out_tasks_without_a_reward_are_said_beside_the_mean(run, capsys):
    result = run(reward=lambda task, result: None if task["q"] == 100 else result / 3)
    assert result.summary["eval_after"]["missing"] == 1
    assert result.reward_after == 1.0
    out = capsys.readouterr().out
    assert "0.000 (1 of 4 missing) -> 1.000 (1 of 4 missing)" in out
    assert "(step 0, 1 of 4 missing)" in out


def test_without_held_out_tasks_it_says_so(run, capsys):
    result = run(eval_dataset=None)
    assert (result.reward_before, result.reward_after) == (None, None)
    out = capsys.readouterr().out
    assert "no eval_dataset" in out
    assert "not measured" in out


def test_a_reward_that_returns_a_string_stops_everything_with_a_sentence(run, services):
    with pytest.raises(RewardError, match=r"returned 'good' \(a str\)"):
        run(reward=lambda task, result: "good")
    assert services.last.events == ["gateway", "stopped"]


def test_an_agent_that_raises_stops_everything_with_a_sentence(run, services, tmp_path):
    def broken(task):
        raise KeyError("tool")

    with pytest.raises(areal_agent.AgentError, match=r"failed in 3 sessions in a row.*KeyError: 'tool'"):
        run(agent=broken, config=CONFIG | {"rollout": {"max_failures": 2}})
    assert services.last.events[-1] == "stopped"
    assert 'raise KeyError("tool")' in (tmp_path / "run" / "logs" / "controller.log").read_text()


def test_a_failing_trainer_stops_everything(run, services):
    services.trainer_error = TrainerError("the trainer ended with code 1")
    with pytest.raises(TrainerError, match="ended with code 1"):
        run()
    assert services.last.events == ["gateway", "trainer", "stopped"]


def test_ctrl_c_stops_everything_and_seals_what_was_open(run, services):
    pressed = []

    async def interrupted(task):
        if services.last.standin.version >= 1 and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), 2)
            await asyncio.sleep(30)
        return await agent(task)

    with pytest.raises(KeyboardInterrupt):
        run(agent=interrupted)
    assert services.last.events[-1] == "stopped"
    assert all(not s["open"] for s in services.last.standin.sessions.values())


async def test_a_running_event_loop_is_pointed_at_the_async_twin(services, model, tmp_path):
    with pytest.raises(ArealError, match=r"await areal_agent.atrain\(...\)"):
        areal_agent.train(agent, reward, dataset=TASKS, model=model)
    result = await areal_agent.atrain(
        agent,
        reward,
        dataset=TASKS,
        eval_dataset=HELD_OUT,
        model=model,
        config=CONFIG,
        run_dir=tmp_path / "r",
    )
    assert result.reward_after == 1.0


def test_evaluate_and_rollout_train_nothing(services, model, tmp_path):
    result = areal_agent.evaluate(agent, reward, dataset=TASKS, model=model, run_dir=tmp_path / "e")
    assert (result.tasks, result.reward) == (8, 0.0)
    groups = areal_agent.rollout(
        agent, reward, dataset=TASKS[:3], group_size=4, model=model, run_dir=tmp_path / "r"
    )
    assert [len(g.episodes) for g in groups] == [4, 4, 4]
    assert services.last.events == ["gateway", "stopped"]
    assert {s["purpose"] for s in services.last.standin.sessions.values()} == {"rollout"}


def test_an_agent_that_keeps_its_client_serves_a_second_run(services, model, tmp_path):
    """Its client was built for the first run's gateway and holds connections of a closed event loop."""
    client = functools.cache(lambda: AsyncOpenAI(max_retries=0))

    async def agent(task):
        reply = await client().chat.completions.create(**BODY)
        return json.loads(reply.choices[0].message.content)["version"]

    for name in "abc":
        result = areal_agent.evaluate(agent, reward, dataset=TASKS, model=model, run_dir=tmp_path / name)
        assert (result.tasks, result.missing) == (8, 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dataset": None}, "no dataset"),
        ({"dataset": [{"q": 1}, 7]}, "item 1: a task must be a JSON object, this one is a int: 7"),
        ({"model": "/no/such/folder"}, "the model folder /no/such/folder does not exist"),
        ({"model": ""}, "no model"),
        ({"config": {"trainer": {"steps": 0}}}, r"trainer.steps = 0: input should be greater than 0"),
        ({"config": {"trainer": {"stepz": 1}}}, "trainer.stepz: no such setting"),
        ({"config": 3}, "config is a int"),
        ({"config": {"sampling": {"top_p": 0.9}}}, r"sampling.top_p = 0.9 .* train with top_p 1 and top_k 0"),
        ({"config": {"sampling": {"top_k": 20}}}, r"sampling.top_k = 20: replies .* train with top_p 1"),
        ({"agent": lambda: 1}, "the agent takes 0 arguments"),
        ({"reward": "good"}, "the reward is a str"),
        ({"config": {"gateway": {"host": "0.0.0.0"}}}, "not a loopback address"),
    ],
)
def test_bad_input_is_a_sentence_before_anything_starts(run, services, change, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        run(**change)
    assert not hasattr(services, "last")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_folder_is_a_sentence(model, missing):
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=missing.removeprefix("model.")):
        checks.model_folder(str(model))


def test_an_unreadable_model_config_is_a_sentence(model):
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"unreadable config.json: Expecting"):
        checks.model_folder(str(model))


def test_a_port_in_use_is_a_sentence():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            checks.address(GatewayConfig(port=port))
    checks.address(GatewayConfig(port=port))


@pytest.mark.parametrize(
    ("asked", "free", "planned"),
    [("auto", 64, 2), ("auto", 9, 2), ("auto", 8.9, 1), ("auto", 5.5, 1), (2, 64, 2), (4, 64, 4), (1, 6, 1)],
)
def test_engines_are_planned_by_memory(asked, free, planned):
    count, why = plan_engines(RunConfig.parse({"fleet": {"engines": asked}}), free)
    assert count == planned
    assert f"{free:.1f} GiB are free" in why


@pytest.mark.parametrize(("asked", "free"), [(2, 6.0), (2, 8.9), ("auto", 5.4)])
def test_too_little_memory_is_a_sentence(asked, free):
    with pytest.raises(ConfigError, match=rf"too little memory for .* engines.*only {free} GiB is available"):
        plan_engines(RunConfig.parse({"fleet": {"engines": asked}}), free)


def test_a_run_folder_is_never_used_twice(run):
    run()
    with pytest.raises(ConfigError, match="already holds a run"):
        run()


async def test_a_gateway_error_that_a_death_caused_is_reported_as_that_death(tmp_path):
    """What the user must read is why the gateway died, not that a request failed."""
    import sys

    from areal_agent.launch.process import Guarded
    from areal_agent.rundir import RunDir

    run = RunDir.create(RunConfig(run_dir=str(tmp_path / "run")))
    services = Services(run, run.read_config())
    code = "import time; print('EngineError: no such device'); time.sleep(0.3); raise SystemExit(5)"
    services._processes["gateway"] = await Guarded.astart(
        [sys.executable, "-c", code], log_path=run.log("gateway")
    )

    async def work():
        raise GatewayError("connection refused")

    with pytest.raises(
        GatewayError, match=r"ended with code 5:\n.*no such device\nThe whole log: .*gateway.log"
    ):
        await services.watch(work())
    with pytest.raises(GatewayError, match="ended with code 5"):
        await services.watch(asyncio.sleep(60))
    await services.stop()


def test_a_terminal_gets_one_live_panel():
    from areal_agent.panel import LivePanel, Progress, view

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    progress = Progress(
        name="demo", steps=10, step=4, rewards=[0.1, 0.5], evals=[(0, 0.25)], phase="training"
    )
    progress.eval_missing = (3, 64)
    progress.engines = {"serving": 2}
    with view(progress, out) as live:
        assert isinstance(live, LivePanel)
        live.note("look here")
    text = out.getvalue()
    for part in (
        "demo",
        "step 4/10",
        "0.500",
        "0.250 at step 0, 3 of 64 missing",
        "2 serving",
        "note: look here",
    ):
        assert part in text
