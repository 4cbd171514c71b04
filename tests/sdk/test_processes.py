"""The real gateway process, started by a real controller: it answers, and it never outlives its starter."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fakes.engine import FakeEngine
from openai import AsyncOpenAI
from processes import alive, wait_for
from small_folder import build_folder

import areal_agent
from areal_agent.errors import GatewayError
from areal_agent.launch import guard
from areal_agent.rundir import RunDir
from areal_agent.session import GatewayClient

FAKE = Path(__file__).parent.parent / "fakes" / "engine.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model):
    return {"model": str(model), "fleet": {"start_timeout_s": 20}, "sampling": {"max_tokens": 8}}


async def agent(task):
    reply = await AsyncOpenAI().chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task["q"]}]
    )
    assert reply.usage is not None
    return reply.usage.completion_tokens


async def test_evaluate_runs_through_a_real_gateway_process(config, tmp_path):
    async with FakeEngine(vocab=200) as engine:
        config["fleet"]["attach"] = [engine.url]
        result = await areal_agent.aevaluate(
            agent,
            lambda task, result, trajectory: float(len(trajectory["calls"]) == 1 and result == 8),
            dataset=[{"q": f"question {i}"} for i in range(6)],
            config=config,
            run_dir=tmp_path / "run",
        )
    assert (result.tasks, result.missing, result.reward) == (6, 0, 1.0)
    log = (tmp_path / "run" / "logs" / "gateway.log").read_text()
    assert "Traceback" not in log
    assert not (tmp_path / "run" / "gateway.json").exists(), "it ended in order"


async def test_a_gateway_that_cannot_start_is_a_sentence_with_its_log(config, tmp_path):
    config["fleet"] |= {"attach": ["http://127.0.0.1:9"], "start_timeout_s": 2}
    with pytest.raises(GatewayError, match=r"(?s)the gateway ended with code .*127.0.0.1:9.*gateway.log"):
        await areal_agent.aevaluate(
            agent, None, dataset=[{"q": "x"}], config=config, run_dir=tmp_path / "run"
        )


CONTROLLER = textwrap.dedent("""
    import json, sys, time
    import areal_agent
    config, run_dir = json.loads(sys.argv[1]), sys.argv[2]
    def agent(task):
        open(run_dir + "/agent-runs", "w").close()
        time.sleep(300)
    areal_agent.evaluate(agent, lambda task, result: 1.0, dataset=[{"q": "x"}], config=config, run_dir=run_dir)
""")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_whatever_ends_the_controller_nothing_is_left(config, tmp_path, end):
    run_dir = tmp_path / "run"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    engine = subprocess.Popen([sys.executable, str(FAKE), "--port", str(port)], stdout=subprocess.DEVNULL)
    config["fleet"]["attach"] = [f"http://127.0.0.1:{port}"]
    controller = None
    try:
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 20)
        controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, json.dumps(config), str(run_dir)])
        wait_for((run_dir / "agent-runs").exists, 60)
        children = guard.descendants(controller.pid)
        url = json.loads((run_dir / "gateway.json").read_text())["url"]
        assert len(children) >= 3, "two guard processes and the gateway"
        controller.send_signal(end)
        controller.wait(30)
        wait_for(lambda: not any(map(alive, children)), 30)
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", int(url.rpartition(":")[2])))
    finally:
        for process in (controller, engine):
            if process is not None:
                process.kill()
                process.wait()


async def test_the_gateway_runs_by_itself_and_prints_its_address_and_where_its_key_is(config, tmp_path):
    run_dir = tmp_path / "run"
    async with FakeEngine(vocab=200) as engine:
        command = [sys.executable, "-m", "areal_agent.cli", "gateway", "--model", config["model"]]
        command += ["--run-dir", str(run_dir), "--set", f"fleet.attach=['{engine.url}']"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(60):
                lines = [(await process.stdout.readline()).decode().strip() for _ in range(2)]
            assert lines[0] == f"admin key: {run_dir / 'admin.key'}"
            assert lines[1].startswith("gateway: http://127.0.0.1:")
            key = RunDir(run_dir).admin_key()
            assert key not in "".join(lines)
            async with GatewayClient(lines[1].removeprefix("gateway: "), key) as client:
                assert (await client.status())["version"] == 0
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(20):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
