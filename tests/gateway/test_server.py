"""The gateway as a process of its own, with the real fleet attached to a fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.engine import FakeEngine
from fakes.policy import expected
from gateway_support import eventually

from areal_agent.wire import unpack
from areal_gateway.tokens import Tokens

ASK = {"messages": [{"role": "user", "content": "What is two plus three?"}], "max_tokens": 6}


class Process:
    """`serve(run_dir)` in a subprocess."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(config))
        self.log = open(run_dir / "log", "a")  # noqa: SIM115 (the process writes to it)
        code = (
            "import sys\n"
            "from areal_agent.errors import ArealError\n"
            "from areal_gateway.server import serve\n"
            "try: serve(sys.argv[1])\n"
            "except ArealError as e: sys.exit(f'error: {e}')\n"
        )
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, str(run_dir)], stderr=self.log, stdout=self.log
        )

    async def url(self, session: aiohttp.ClientSession, timeout_s: float = 60.0) -> str:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.popen.poll() is not None:
                raise AssertionError(f"the gateway ended: {(self.run_dir / 'log').read_text()}")
            path = self.run_dir / "gateway.json"
            if path.exists():
                told = json.loads(path.read_text())
                assert told["pid"] == self.popen.pid
                return told["url"]
            await asyncio.sleep(0.05)
        raise AssertionError((self.run_dir / "log").read_text())

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(20)
        finally:
            self.popen.kill()
            self.log.close()


@pytest.fixture
async def engine(tokens: Tokens) -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as fake:
        yield fake


async def admin(run_dir: Path, http: aiohttp.ClientSession, url: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {(run_dir / 'admin.key').read_text().strip()}"}
    async with http.request("GET" if body is None else "POST", url + path, json=body, headers=headers) as r:
        raw = await r.read()
        assert r.status < 300, raw
        return json.loads(raw) if r.content_type == "application/json" else raw


async def test_a_run_on_the_real_fleet_survives_a_restart_of_the_gateway(
    engine: FakeEngine, model_folder: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = {"model": str(model_folder), "fleet": {"attach": [engine.url], "max_model_len": 2048}}
    async with aiohttp.ClientSession() as http:
        first = Process(run_dir, config)
        try:
            url = await first.url(http)
            session = await admin(
                run_dir,
                http,
                url,
                "/admin/sessions",
                {"task_id": "t", "purpose": "train", "sampling": {"seed": 5}},
            )
            key = {"Authorization": f"Bearer {session['api_key']}"}
            async with http.post(url + "/v1/chat/completions", json=ASK, headers=key) as r:
                assert r.status == 200, await r.text()
                reply = await r.json()
            # That the last byte left is a row of its own, written after it; a kill in between loses that row.
            await eventually(lambda: _count(run_dir, "deliveries") == 1)
        finally:
            assert first.end(signal.SIGKILL) == -signal.SIGKILL

        second = Process(run_dir, config)
        (run_dir / "gateway.json").unlink()  # the killed one could not
        try:
            url = await second.url(http)
            session_path = f"/admin/sessions/{session['session_id']}"
            seen = await admin(run_dir, http, url, session_path)
            assert [c["state"] for c in seen["calls"]] == ["truncated"]
            assert seen["calls"][0]["reply"]["content"] == reply["choices"][0]["message"]["content"]
            await admin(run_dir, http, url, session_path + "/rewards", {"value": 1.0, "key": "k"})
            await admin(run_dir, http, url, session_path + "/seal", {"outcome": "finished"})
            batch = unpack(
                await admin(
                    run_dir, http, url, "/admin/trajectories/lease", {"groups": 1, "max_staleness": 0}
                )
            )
            (sequence,) = batch.sequences
            n = sum(sequence.loss_mask)
            prompt = list(sequence.token_ids[:-n])
            ids, logprobs = expected(prompt, n, seed=_seed(run_dir))
            assert list(sequence.token_ids[-n:]) == ids
            assert list(sequence.logprobs[-n:]) == pytest.approx(logprobs, abs=1e-6)
            assert set(sequence.versions[-n:]) == {0}
        finally:
            assert second.end() == 0, (run_dir / "log").read_text()
        assert not (run_dir / "gateway.json").exists()


async def test_engines_are_managed_from_the_command_line_while_the_gateway_runs(
    engine: FakeEngine, model_folder: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = {
        "model": str(model_folder),
        "fleet": {"attach": [engine.url], "max_model_len": 2048},
        "gateway": {"hold_timeout_s": 0.3},
    }

    async def cli(*args: str) -> tuple[int | None, str]:
        command = [sys.executable, "-m", "areal_agent.cli", "fleet", *args, "--run-dir", str(run_dir)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        out, _ = await process.communicate()
        return process.returncode, out.decode()

    async with aiohttp.ClientSession() as http, FakeEngine() as other:
        code, said = await cli("list")
        assert (code, "no gateway runs in" in said) == (2, True)
        process = Process(run_dir, config)
        try:
            url = await process.url(http)
            assert (await cli("join", other.url)) == (0, "attached-1 is serving, 0 calls running\n")
            assert (await cli("drain", "attached-0"))[1].startswith("attached-0 is draining")
            code, listed = await cli("list")
            assert code == 0
            assert [line.split()[:2] for line in listed.splitlines()[1:3]] == [
                ["attached-0", "draining"],
                ["attached-1", "serving"],
            ]
            assert listed.endswith("fleet: serving, version 0\n")
            metrics = (await admin(run_dir, http, url, "/metrics")).decode()
            assert 'areal_engines{state="draining"} 1.0' in metrics
            assert 'areal_reprefilled_tokens_total{cause="moved"} 0.0' in metrics
            code, said = await cli("leave", "nobody")
            assert (code, "no engine is called nobody" in said) == (1, True)
            assert (await cli("leave", "attached-1"))[1].startswith("attached-1 is gone")

            session = await admin(
                run_dir, http, url, "/admin/sessions", {"task_id": "t", "purpose": "rollout"}
            )
            key = {"Authorization": f"Bearer {session['api_key']}"}
            async with http.post(url + "/v1/chat/completions", json=ASK, headers=key) as r:
                assert (r.status, int(r.headers["Retry-After"]) > 0) == (503, True)
                assert "no engine served within 0.3 s" in await r.text()
        finally:
            assert process.end() == 0


def _count(run_dir: Path, table: str) -> int:
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        return db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]


def _seed(run_dir: Path) -> int:
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        return db.execute("SELECT seed FROM calls").fetchone()[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_engines_start_ends_it_cleanly(
    model_folder: Path, tmp_path: Path, number: int
) -> None:
    config = {"model": str(model_folder), "fleet": {"attach": ["http://127.0.0.1:9"], "start_timeout_s": 60}}
    process = Process(tmp_path / "run", config)
    key = tmp_path / "run" / "admin.key"
    end = time.monotonic() + 60
    while not key.exists() and time.monotonic() < end:
        time.sleep(0.05)  # noqa: ASYNC251 (nothing else runs here)
    time.sleep(0.3)  # noqa: ASYNC251
    assert process.end(number) == 0, (tmp_path / "run" / "log").read_text()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model": "/nowhere"}, "cannot read the model folder"),
        ({"gateway": {"host": "0.0.0.0"}}, "allow_remote"),
        ({"gateway": {"prot": 1}}, "gateway.prot"),
    ],
)
def test_what_cannot_start_says_why_in_a_sentence(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    process = Process(tmp_path / "run", config)
    assert process.popen.wait(60) == 1
    process.log.close()
    text = (tmp_path / "run" / "log").read_text()
    assert says in text
    assert "Traceback" not in text


def test_the_gateway_needs_no_torch() -> None:
    code = "import sys, areal_gateway.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
