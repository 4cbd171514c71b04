"""Trajectories as JSON lines: by label, streamed over the admin plane, and of a folder by the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_support import ADMIN_KEY, Served

from areal_agent import cli
from areal_agent.config import RunConfig
from areal_agent.rundir import RunDir

EXPORT = "/admin/trajectories/export"
ROLE = "x-areal-label-role"


@pytest.fixture
async def recorded(served: Served) -> list[dict[str, Any]]:
    """A solver that a critic continues, a critic alone, an evaluation, and a session that is still open."""
    sessions = [
        await served.open("both"),
        await served.open("critic"),
        await served.open("e", purpose="eval"),
    ]
    messages: list[Any] = [{"role": "user", "content": "What is two plus three?"}]
    _, _, reply = await served.post(sessions[0], {"messages": messages}, {ROLE: "solver"})
    longer = [*messages, reply["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    await served.post(sessions[0], {"messages": longer}, {ROLE: "critic"})
    await served.post(sessions[1], {"messages": messages}, {ROLE: "critic"})
    await served.post(sessions[2], {"messages": messages}, {ROLE: "solver"})
    for session in sessions:
        await served.seal(session, reward=1.0)
    await served.post(await served.open("open"), {"messages": messages}, {ROLE: "solver"})
    return sessions


async def exported(served: Served, query: str = "") -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with served.http.get(served.url + EXPORT + query, headers=headers) as r:
        assert (r.status, r.content_type) == (200, "application/jsonl")
        return [json.loads(line) for line in (await r.read()).splitlines()]


def trained(line: dict[str, Any]) -> list[list[str]]:
    """Of each sequence, the roles of the calls that carry loss."""
    out = []
    for s in line["sequences"]:
        ends = [i for i, m in enumerate(s["loss_mask"]) if m and not any(s["loss_mask"][i + 1 : i + 2])]
        out.append([s["call_labels"][s["call_ends"].index(i + 1)]["role"] for i in ends])
    return out


async def test_a_line_is_what_inspecting_the_session_tells(
    served: Served, recorded: list[dict[str, Any]]
) -> None:
    lines = await exported(served)
    assert [line["task_id"] for line in lines] == ["both", "critic"]
    for line, session in zip(lines, recorded, strict=False):
        told = await served.inspect(session, trajectory=True)
        assert line["sequences"] == told["sequences"]
        assert (line["session_id"], line["reward"]) == (session["session_id"], 1.0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?label.role=solver", {"both": [["solver"]]}),
        ("?label.role=critic", {"both": [["critic"]], "critic": [["critic"]]}),
        ("?label.role=critic&label.role=solver", {"both": [["solver", "critic"]], "critic": [["critic"]]}),
        ("?label.role=nobody", {}),
        ("?label.role=solver&purpose=eval", {"e": [["solver"]]}),
    ],
)
async def test_only_calls_with_the_label_have_loss(
    served: Served, recorded: list[dict[str, Any]], query: str, expected: dict[str, Any]
) -> None:
    assert {line["task_id"]: trained(line) for line in await exported(served, query)} == expected


@pytest.mark.parametrize("query", ["?role=solver", "?label.=x", "?purpose=all"])
async def test_a_filter_that_is_none_is_a_400(served: Served, query: str) -> None:
    status, body = await served.admin("GET", EXPORT + query, status=None)
    assert (status, body["error"]["code"]) == (400, "invalid_request")


async def test_the_command_line_reads_a_run_that_goes_on_or_is_over(
    served: Served, recorded: list[dict[str, Any]], tmp_path: Path, capsysbinary: Any
) -> None:
    run = RunDir(tmp_path)
    run.write_config(RunConfig())
    run.write("gateway.json", {"url": served.url})
    (tmp_path / "admin.key").write_text(ADMIN_KEY)
    expected = await exported(served, "?label.role=solver")

    def command() -> list[Any]:
        with pytest.raises(SystemExit) as end:
            cli.main(["trajectories", str(tmp_path), "--label", "role=solver"])
        assert end.value.code == 0
        return [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]

    assert await asyncio.to_thread(command) == expected
    await served.stop()  # as a gateway that was killed: its address stays behind
    assert await asyncio.to_thread(command) == expected
