"""A whole run, killed and resumed: the real controller, gateway and trainer; only the engine is a fake.

Its engine samples what the test's policy says but takes every broadcast, so what it holds in the end is what was
trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.engine import FakeEngine
from safetensors.torch import load_file
from small_folder import build_folder
from transformers import Qwen3Config, Qwen3ForCausalLM

import areal_agent
from areal_agent.errors import ConfigError
from areal_agent.launch import guard
from areal_agent.rundir import RunDir

STEPS, GROUPS = 6, 2

SCRIPT = """
from openai import AsyncOpenAI

dataset = [{"q": i} for i in range(40)]
eval_dataset = [{"q": i} for i in range(100, 104)]

async def agent(task):
    messages = [{"role": "user", "content": f"question {task['q']}"}]
    reply = await AsyncOpenAI().chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content

def reward(task, result):
    return sum((result or "").encode()) % 7 / 7
"""

SETTINGS = {
    "trainer.steps": STEPS,
    "trainer.checkpoint_every": 2,
    "trainer.logprob_gap_bound": 100,  # the fake's logprobs are of no model
    "rollout.groups_per_step": GROUPS,
    "rollout.group_size": 2,
    "rollout.max_staleness": 1,
    "sampling.max_tokens": 8,
    "eval.every": 0,
    "weights.bucket_mib": 0.05,
}


def make_model(folder: Path) -> Path:
    """A tokenizer the gateway reads, and weights the trainer trains."""
    build_folder(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=320, hidden_size=32, intermediate_size=64, head_dim=8)
    sizes |= dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=4096)).save_pretrained(folder)
    return folder


async def start(script: Path, out: Path, *options: str) -> asyncio.subprocess.Process:
    with out.open("w") as file:
        return await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "areal_agent.cli", "train", str(script), *options],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def lines(run: RunDir, source: str) -> list[dict[str, Any]]:
    rows = map(json.loads, run.metrics_path.read_text().splitlines()) if run.metrics_path.exists() else ()
    return [row for row in rows if row["source"] == source]


async def until_trained(run: RunDir, step: int, process: asyncio.subprocess.Process, out: Path) -> None:
    async with asyncio.timeout(100):
        while not any(row["step"] >= step for row in lines(run, "trainer")):
            assert process.returncode is None, f"see {out}"
            await asyncio.sleep(0.05)


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def trained_batches(ledger: Path) -> list[tuple[int, list[str]]]:
    """(version it was leased at, its groups) of every batch that is in the last weights, by plain SQL.

    A rewind to v takes back the leases at v or later that there were by then.
    """
    with closing(sqlite3.connect(ledger)) as db:
        leases = db.execute("SELECT lease_id, version FROM leases ORDER BY rowid").fetchall()
        ends = dict(db.execute("SELECT lease_id, kind FROM lease_ends"))
        rewinds = db.execute("SELECT version, leases FROM rewinds ORDER BY seq").fetchall()
        groups: dict[str, list[str]] = {}
        for lease_id, group in db.execute("SELECT lease_id, group_id FROM lease_groups ORDER BY rowid"):
            groups.setdefault(lease_id, []).append(group)
    kept = [
        (version, lease_id)
        for number, (lease_id, version) in enumerate(leases)
        if ends.get(lease_id) == "ack" and not any(version >= v and number < n for v, n in rewinds)
    ]
    return [(version, groups[lease_id]) for version, lease_id in kept]


@pytest.mark.timeout(300)
async def test_a_run_killed_whole_goes_on_to_its_end(tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", RunDir(tmp_path / "run")
    script.write_text(SCRIPT)
    async with FakeEngine(vocab=200, receiver="gloo") as engine:
        options = ["--model", str(make_model(tmp_path / "model")), "--run-dir", str(run.path)]
        for name, value in (SETTINGS | {"fleet.attach": f"['{engine.url}']"}).items():
            options += ["--set", f"{name}={value}"]
        process = await start(script, tmp_path / "first", *options)
        try:
            await until_trained(run, 3, process, tmp_path / "first")
            with pytest.raises(ConfigError, match="still goes on, in another process"):
                await areal_agent.atrain(print, None, dataset=[{"q": 0}], resume=run.path)
            kill_all([process.pid, *guard.descendants(process.pid)])
            await process.wait()
            before = run.read("eval_before.json")
            assert before is not None
            assert 2 <= run.resumable_version() < STEPS

            process = await start(script, tmp_path / "second", "--resume", str(run.path))
            async with asyncio.timeout(150):
                code = await process.wait()
            said = (tmp_path / "second").read_text()
            assert code == 0, said + run.log("trainer").read_text()[-3000:]
        finally:
            kill_all([process.pid, *guard.descendants(process.pid)])

    summary = run.read("summary.json") or {}
    assert (summary["steps"], summary["final_version"]) == (STEPS, STEPS)
    assert summary["staleness_max"] <= 1
    assert (summary["reward_before"], summary["eval_before"]) == (before["reward"], before)
    assert summary["reward_after"] is not None
    assert [r["step"] for r in lines(run, "trainer")] == list(range(1, STEPS + 1))
    # The controller looks now and then: of steps faster than that it sees the last.
    seen = [r["step"] for r in lines(run, "controller") if "eval_reward" not in r]
    assert seen == sorted(set(seen))
    assert seen[-1] == STEPS
    assert all(row["staleness_max"] <= 1 for row in lines(run, "trainer"))

    batches = trained_batches(run.path / "ledger.sqlite")
    assert [version for version, _ in batches] == list(range(STEPS))
    groups = [group for _, batch in batches for group in batch]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    assert len({group.partition("-")[0] for group in groups}) == STEPS * GROUPS  # no task's turn came twice

    saved = load_file(Path(summary["checkpoint"]) / "model.safetensors")
    assert engine.weights_version == STEPS
    assert engine.loaded.keys() == saved.keys()
    assert all(torch.equal(engine.loaded[name], saved[name]) for name in saved)

    with pytest.raises(
        ConfigError, match=r"has ended after 6 steps.*start a run with the model .*step-000006"
    ):
        await areal_agent.atrain(print, None, dataset=[{"q": 0}], resume=run.path)
