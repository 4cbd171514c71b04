"""Groups complete whatever agents do; failures are bounded; admission holds; evaluation is greedy."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
import time

import pytest
from openai import AsyncOpenAI, OpenAI
from processes import alive
from standin_gateway import shared_client

from areal_agent.agents import AgentRunner, Command
from areal_agent.dataset import load, passes
from areal_agent.episode import SEAL_SLACK_S
from areal_agent.errors import AgentError, ConfigError, GatewayError, RewardError
from areal_agent.rewards.runner import THREADS

pytestmark = pytest.mark.usefixtures("observed")
ITEMS = load([{"q": i} for i in range(6)])
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SMALL = {"groups_per_step": 2, "group_size": 3, "max_staleness": 1, "max_failures": 5}


async def agent(task):
    reply = await shared_client().chat.completions.create(**BODY)
    return json.loads(reply.choices[0].message.content)["session"]


def one(task, result):
    return 1.0


async def drive(controller, standin, steps, batch=2):
    """The controller against a trainer that steps whenever it may; returns when `steps` are done."""

    async def trainer():
        while standin.version < steps:
            if standin.train_step(batch):
                controller.see_version(standin.version)
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as group:
        group.create_task(trainer())
        work = group.create_task(controller.train(ITEMS))
        await asyncio.wait({work})


@pytest.mark.parametrize("eta", [0, 1, 2])
async def test_a_run_trains_every_batch_within_eta_and_admits_no_group_in_vain(controller, standin, eta):
    async def uneven(task, session):
        await asyncio.sleep(0.03 if int(session.id, 16) % 5 == 0 else 0.001)
        return await agent(task)

    c = controller(uneven, one, rollout=SMALL | {"max_staleness": eta}, trainer={"steps": 6})
    await drive(c, standin, steps=6)
    assert standin.version == 6
    assert len(standin.consumed) == 12
    assert max(standin.staleness) <= eta
    assert len(standin.groups()) == 12
    assert standin.most_open_groups <= (eta + 1) * 2
    assert all(len(members) == 3 for members in standin.groups().values())


async def test_a_resumed_run_runs_again_only_the_groups_that_were_abandoned(controller):
    """Numbers give a group its task and its seeds, so what runs again is what would have run."""
    c = controller(agent, one, rollout=SMALL, trainer={"steps": 3})
    c.resume({"0-a": "consumed", "1-b": "void", "2-c": "abandoned", "3-d": "ready", "4-e": "consumed"}, 0)
    assert (c.admission.accepted, c.admission.room) == (3, 1)
    c.see_version(2)
    await c.train(ITEMS)
    order = list(itertools.islice(passes(ITEMS, 0), 7))
    assert {g.group_id.split("-")[0]: g.item for g in c.groups} == {
        "2": order[2],
        "5": order[5],
        "6": order[6],
    }


async def test_a_resumed_run_admits_by_its_own_version_not_by_what_the_engines_held(controller):
    """Else groups begun under the weights it goes back to would be too old when their turn comes."""
    c = controller(agent, one, rollout=SMALL, trainer={"steps": 6})
    c.see_version(3)  # the engines outlived the run
    c.resume({f"{n}-a": "consumed" for n in range(8)}, 2)
    assert (c.admission.version, c.admission.room) == (2, 0)
    c.see_version(3)
    assert c.admission.room == 2


async def test_a_group_whose_agents_fail_completes_with_missing_rewards(controller, standin, caplog):
    turn = itertools.count()

    async def flaky(task, session):
        await agent(task)
        if next(turn) % 3 == 0:
            raise ValueError("the model wrote nonsense")
        return "ok"

    c = controller(flaky, one, rollout=SMALL, trainer={"steps": 3})
    with caplog.at_level(logging.WARNING, "areal_agent"):
        await drive(c, standin, steps=3)
    failed = [s for s in standin.sessions.values() if s["outcome"] == "failed"]
    assert failed
    assert all(s["rewards"] == {} and "the model wrote nonsense" in s["error"] for s in failed)
    assert all(not s["open"] for s in standin.sessions.values())
    assert sum("the agent raised" in r.getMessage() for r in caplog.records) == 1
    assert 'raise ValueError("the model wrote nonsense")' in caplog.text


async def test_an_agent_that_always_raises_stops_the_run_with_its_first_error(controller, standin):
    async def broken(task):
        raise KeyError("no such tool")

    c = controller(broken, one, rollout=SMALL)
    with pytest.raises(
        AgentError, match=r"6 sessions in a row.*max_failures = 5.*KeyError: 'no such tool'"
    ) as e:
        await c.train(ITEMS)
    assert isinstance(e.value.__cause__, KeyError)
    assert all(not s["open"] for s in standin.sessions.values()), "stopped sessions are sealed"


async def test_a_reward_that_always_raises_stops_the_run(controller):
    def broken(task, result):
        raise KeyError("answer")

    c = controller(agent, broken, rollout=SMALL)
    with pytest.raises(
        RewardError, match=r"the reward function failed in 6 sessions in a row.*KeyError: 'answer'"
    ):
        await c.train(ITEMS)


async def test_a_reward_that_returns_a_string_stops_the_run_at_once(controller, standin):
    c = controller(agent, lambda task, result: "1.0", rollout=SMALL)
    with pytest.raises(RewardError, match=r"returned '1.0' \(a str\)"):
        await c.train(ITEMS)
    assert all(not s["open"] for s in standin.sessions.values())


async def test_failures_that_are_not_in_a_row_do_not_stop_the_run(controller, standin):
    turn = itertools.count()

    async def flaky(task):
        await agent(task)
        if next(turn) % 2:
            raise ValueError

    c = controller(flaky, one, rollout=SMALL | {"max_failures": 20}, trainer={"steps": 4})
    await drive(c, standin, steps=4)
    assert standin.version == 4


async def test_a_session_that_runs_too_long_is_sealed_as_timed_out(controller, standin):
    turn = itertools.count()

    async def slow(task, session):
        await agent(task)
        if next(turn) % 3 == 0:
            await asyncio.sleep(30)

    c = controller(slow, one, rollout=SMALL | {"session_timeout_s": 0.3}, trainer={"steps": 1})
    await drive(c, standin, steps=1)
    timed_out = [s for s in standin.sessions.values() if s["outcome"] == "timeout"]
    assert timed_out
    assert all(s["rewards"] == {} for s in timed_out)


async def test_void_groups_free_their_admission(controller, standin):
    """Every other task has no reward at all; the run still gets its batches."""
    c = controller(
        agent, lambda task, result: None if task["q"] % 2 else 1.0, rollout=SMALL | {"max_failures": 100},
        trainer={"steps": 5},
    )  # fmt: skip
    await drive(c, standin, steps=5)
    assert standin.version == 5
    assert any(g.void for g in c.groups)
    assert c.admission.accepted == 10


async def test_a_run_with_nothing_to_train_on_ends_with_the_reason(controller):
    c = controller(agent, lambda task, result: None, rollout=SMALL)
    with pytest.raises(AgentError, match="nothing to train on; of the last 3, 3 have no reward"):
        await c.train(ITEMS)


async def test_a_session_without_calls_is_explained_once(controller, caplog):
    async def lazy(task):
        return "42"

    c = controller(lazy, one, rollout=SMALL)
    with (
        caplog.at_level(logging.WARNING, "areal_agent"),
        pytest.raises(AgentError, match="without a single call reaching the gateway"),
    ):
        await c.train(ITEMS)
    assert sum("without a single call" in r.getMessage() for r in caplog.records) == 1
    assert c.episodes.silent >= 15


async def test_the_gateways_failure_is_not_the_agents(controller, standin):
    standin.fail_next = [503] * 50
    c = controller(agent, one, rollout=SMALL)
    with pytest.raises(GatewayError, match="503"):
        await c.train(ITEMS)


async def test_at_most_concurrency_agents_run_at_once(controller, standin):
    running = most = 0

    async def counting(task):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await agent(task)
        await asyncio.sleep(0.01)
        running -= 1

    c = controller(counting, one, rollout=SMALL | {"concurrency": 4}, trainer={"steps": 2})
    await drive(c, standin, steps=2)
    assert most == 4


async def test_evaluation_is_greedy_once_per_task_and_missing_is_not_zero(controller, standin):
    c = controller(agent, lambda task, result: None if task["q"] == 0 else float(task["q"] % 2))
    result = await c.evaluate(ITEMS)
    assert (result.tasks, result.missing) == (6, 1)
    assert result.reward == pytest.approx(3 / 5)
    assert result.reward_missing_as_zero == pytest.approx(3 / 6)
    sessions = standin.sessions.values()
    assert {s["purpose"] for s in sessions} == {"eval"}
    assert all(s["sampling"] == {"temperature": 0.0} for s in sessions)
    assert sorted(s["task_id"] for s in sessions) == sorted(i.task_id for i in ITEMS)


def sync_agent(task):
    time.sleep(0.01)
    reply = OpenAI().chat.completions.create(**BODY)
    return json.loads(reply.choices[0].message.content)["session"]


class Areal:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        reply = await client.chat.completions.create(**BODY)
        return json.loads(reply.choices[0].message.content)["session"]


async def by_hand(task, base_url, api_key):
    reply = await AsyncOpenAI(base_url=base_url, api_key=api_key).chat.completions.create(**BODY)
    return json.loads(reply.choices[0].message.content)["session"]


COMMAND = (
    "import json, sys, httpx, os; task = json.load(sys.stdin);"
    "r = httpx.post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json={'model': 'm', 'messages': []},"
    " headers={'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']});"
    "print(json.loads(r.json()['choices'][0]['message']['content'])['session'])"
)


@pytest.mark.parametrize(
    "form",
    [agent, sync_agent, Areal(), by_hand, Command([sys.executable, "-c", COMMAND])],
    ids=["async", "sync", "object", "by hand", "command"],
)
async def test_every_form_of_agent_reaches_its_own_session(controller, standin, form):
    """Sixteen at once, in one process (or as commands): each call lands in the session it was made for."""
    seen = []

    def reward(task, result, session, trajectory):
        seen.append((result, session.id, len(trajectory["calls"])))
        return 1.0

    c = controller(form, reward)
    await c.evaluate(load([{"q": i} for i in range(4 if isinstance(form, Command) else 16)]))
    assert len(seen) == len(standin.sessions)
    assert all(result == sid and calls == 1 for result, sid, calls in seen)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (Areal, "the agent is the class Areal; pass an instance"),
        ("python agent.py", "the agent is a str"),
        (lambda: 1, r"takes 0 arguments; it must be a function agent\(task\)"),
        (lambda task, tools: 1, "needs tools, which nobody provides"),
    ],
)
def test_an_agent_that_cannot_be_called_is_a_sentence(bad, sentence):
    with pytest.raises(ConfigError, match=sentence):
        AgentRunner(bad)


async def test_a_command_that_fails_shows_its_stderr(controller, standin):
    command = Command([sys.executable, "-c", "import sys; print('no key', file=sys.stderr); sys.exit(3)"])
    c = controller(command, one, rollout=SMALL | {"max_failures": 0})
    with pytest.raises(AgentError, match="ended with code 3: no key"):
        await c.evaluate(ITEMS[:1])


async def test_a_command_that_runs_too_long_is_ended(controller, standin, tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    c = controller(Command([sys.executable, "-c", code]), one, rollout={"session_timeout_s": 1.0})
    result = await c.evaluate(ITEMS[:1])
    assert result.episodes[0].outcome == "timeout"
    for _ in range(250):
        if not alive(int(pid_file.read_text())):
            return
        await asyncio.sleep(0.02)
    pytest.fail("the command outlived its session")


async def test_an_agent_that_blocks_the_loop_is_told_so(controller, monkeypatch, caplog):
    monkeypatch.setattr("areal_agent.controller.LAG_S", 0.2)

    async def blocking(task):
        time.sleep(0.3)  # noqa: ASYNC251 - the fault under test
        return await agent(task)

    c = controller(blocking, one, rollout=SMALL, trainer={"steps": 1})
    with caplog.at_level(logging.WARNING, "areal_agent"):
        await c.train(ITEMS)
    assert "must be a plain `def`" in caplog.text


async def test_a_reward_of_none_keeps_what_the_agent_itself_recorded(controller, standin):
    async def rewards_itself(task, session):
        await agent(task)
        await session.reward(0.5)

    c = controller(rewards_itself, lambda task, result: None)
    assert (await c.evaluate(ITEMS[:2])).reward == 0.5


async def test_a_reward_after_the_gateways_deadline_is_missing_and_said_once(controller, standin, caplog):
    """The gateway seals by itself a session whose deadline passed; the run goes on."""

    def slow(task, result, session):
        if task["q"] < 2:
            standin.sessions[session.id]["open"] = False
        return 1.0

    c = controller(agent, slow, rollout={"max_failures": 2})
    with caplog.at_level(logging.WARNING, "areal_agent"):
        result = await c.evaluate(ITEMS)
    assert (result.tasks, result.missing, result.reward) == (6, 2, 1.0)
    assert [e.outcome for e in result.episodes] == ["timeout"] * 2 + ["finished"] * 4
    assert c.episodes.late == 2
    (said,) = [r.getMessage() for r in caplog.records if "missing (not 0)" in r.getMessage()]
    assert "deadline" in said


async def test_a_session_keeps_its_place_until_it_is_rewarded(controller, standin):
    """Else rewards would queue without bound, on the time of the sessions' deadline."""
    most = 0

    def slow(task, result):
        nonlocal most
        most = max(most, sum(s["open"] for s in standin.sessions.values()))
        time.sleep(0.02)
        return 1.0

    c = controller(agent, slow, eval={"concurrency": 2})
    assert (await c.evaluate(ITEMS)).missing == 0
    assert most == 2


async def test_the_gateways_deadline_leaves_time_for_the_queue_of_rewards(controller, standin):
    settings = {"rollout": {"session_timeout_s": 100, "reward_timeout_s": 10, "concurrency": 10 * THREADS}}
    settings["eval"] = {"concurrency": 1}

    async def quick(task, result):
        return 1.0

    await controller(agent, one, **settings).evaluate(ITEMS[:1])
    await controller(agent, quick, **settings).evaluate(ITEMS[:1])
    deadlines = [s["deadline_s"] for s in standin.sessions.values()]
    assert deadlines == [100 + 11 * 10 + SEAL_SLACK_S, 100 + 10 + SEAL_SLACK_S]
