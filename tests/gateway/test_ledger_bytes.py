"""How much a long session costs on disk: its final sequence once, not once a turn."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import orjson
from gateway_support import CALCULATOR, Served, make_app, tool_call

from areal_agent.config import GatewayConfig
from areal_gateway.tokens import Tokens

WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
]
TURNS = 50
ROOM = 1.3
"""Bytes of the ledger allowed for one that its final sequence needs."""


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def talk(served: Served, turns: int) -> tuple[int, int]:
    """A conversation with tools. Returns (bytes the ledger grew by, bytes its final sequence needs)."""
    rng = random.Random(1)
    session = await served.open()
    before = size(served)
    messages: list[Any] = [
        {"role": "system", "content": sentence(rng, 200)},
        {"role": "user", "content": sentence(rng, 60)},
    ]
    for turn in range(turns):
        arguments = orjson.dumps({"expression": sentence(rng, 12)}).decode()
        served.fleet.say(sentence(rng, 40) + "\n" + tool_call(arguments=arguments))
        body = {"messages": messages, "tools": [CALCULATOR]}
        status, _, answer = await served.post(session, body)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        messages.append(message)
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": sentence(rng, 60)})
        assert turn == turns - 1 or messages[-1]["role"] == "tool"
    await served.seal(session, reward=1.0)
    grown = size(served) - before
    (s,) = (await served.inspect(session, trajectory=True))["sequences"]
    assert len(s["call_ids"]) == turns
    spans = 3 * 4 * turns
    messages_once = len(orjson.dumps(messages)) + len(orjson.dumps([CALCULATOR]))
    sampled = sum(s["loss_mask"])
    return grown, 4 * len(s["token_ids"]) + 4 * sampled + spans + messages_once


def size(served: Served) -> int:
    """Of the file once the write-ahead log is folded into it."""
    with sqlite3.connect(served.ledger.path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return served.ledger.path.stat().st_size


async def test_fifty_turns_cost_their_final_sequence_and_a_little(model_folder: Path, tmp_path: Path) -> None:
    served = make_app(Tokens.load(model_folder, GatewayConfig(), context=200_000), tmp_path)
    await served.start()
    try:
        grown, needed = await talk(served, TURNS)
        print(f"{TURNS} turns: {grown} bytes for {needed} needed, {grown / needed:.2f}")
        assert grown <= ROOM * needed
    finally:
        await served.stop()
