"""The first way in: a gateway of its own, and an agent pointed at it by hand. And what is left when it dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from process_tree import descendants, left_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

START_S = 240


@dataclass
class ByHand:
    """A running `areal-agent gateway`, as a user starts it."""

    process: subprocess.Popen
    run_dir: Path

    @property
    def url(self) -> str:
        return json.loads((self.run_dir / "gateway.json").read_text())["url"]

    def admin(self) -> httpx.Client:
        key = (self.run_dir / "admin.key").read_text().strip()
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture(scope="module")
def gateway(blank_model, tmp_path_factory) -> Iterator[ByHand]:
    run_dir = tmp_path_factory.mktemp("gateway") / "run"
    command = [
        sys.executable,
        "-m",
        "areal_agent.cli",
        "gateway",
        "--model",
        str(blank_model),
        "--engines",
        "1",
    ]
    command += [
        "--run-dir",
        str(run_dir),
        "--set",
        "fleet.max_model_len=512",
        "--set",
        "sampling.max_tokens=32",
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while not (run_dir / "gateway.json").exists():
            assert process.poll() is None, f"the gateway ended with {process.returncode}"
            assert time.monotonic() < end, f"no gateway after {START_S} s"
            time.sleep(0.2)
        yield ByHand(process, run_dir)
    finally:
        process.kill()
        process.wait()


def test_an_agent_in_its_own_process_is_recorded_token_for_token(gateway, examples):
    """OPENAI_BASE_URL and OPENAI_API_KEY are all that the program is told."""
    with gateway.admin() as admin:
        session = (
            admin.post("/admin/sessions", json={"task_id": "t", "purpose": "rollout"})
            .raise_for_status()
            .json()
        )
        env = os.environ | {"OPENAI_BASE_URL": session["base_url"], "OPENAI_API_KEY": session["api_key"]}
        task = json.dumps({"question": "Tom has 37 boxes of 12 pens. How many pens is that?"})
        program = [sys.executable, str(examples / "base_url.py")]
        subprocess.run(program, input=task, text=True, env=env, check=True, capture_output=True, timeout=120)
        reward = {"value": 0.5, "key": "by hand"}
        admin.post(f"/admin/sessions/{session['session_id']}/rewards", json=reward).raise_for_status()
        seal = admin.post(f"/admin/sessions/{session['session_id']}/seal", json={"outcome": "finished"})
        assert seal.raise_for_status().json()["reward"] == 0.5
        seen = admin.get(f"/admin/sessions/{session['session_id']}", params={"trajectory": 1}).json()
    assert seen["calls"]
    assert all(call["versions"] and call["delivered"] for call in seen["calls"])
    for sequence in seen["sequences"]:
        trained = [i for i, m in enumerate(sequence["loss_mask"]) if m]
        assert trained
        assert all(sequence["versions"][i] == 0 and sequence["logprobs"][i] < 0 for i in trained)


def test_streaming_gives_the_same_tokens_as_not_streaming(gateway):
    from openai import OpenAI

    body = {"model": "policy", "messages": [{"role": "user", "content": "How many pens is that?"}]}
    with gateway.admin() as admin:
        opened = {"task_id": "t", "purpose": "eval", "sampling": {"temperature": 0.0}}
        session = admin.post("/admin/sessions", json=opened).raise_for_status().json()
    client = OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0, timeout=60)
    whole = client.chat.completions.create(**body)
    events = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == (whole.choices[0].message.content or "")
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens == 32


def test_a_key_that_opens_nothing_is_told_so(gateway):
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions",
        json={"model": "policy", "messages": [{"role": "user", "content": "hi"}]},
        headers={"authorization": "Bearer wrong"},
        timeout=30,
    )
    assert answer.status_code == 401
    assert "key" in answer.json()["error"]["message"]


def test_killing_the_gateway_leaves_no_engine_and_no_port(gateway):
    """Last in the file: kill -9, and everything below it is gone within seconds."""
    port = urlsplit(gateway.url).port
    below = descendants(gateway.process.pid)
    assert any("vllm" in p.command for p in below)
    gateway.process.send_signal(signal.SIGKILL)
    gateway.process.wait(10)
    assert not left_of(below, within_s=20)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))
