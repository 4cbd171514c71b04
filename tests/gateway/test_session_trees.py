"""Random session trees on four families of tokenizers, against an oracle that shares no code with the gateway.

The oracle knows what the engine was shown and what it sampled, what was sent on top of which reply, and how
the conversation reads as text by the model's own template (Jinja, or ChatML written out here). It holds:
every call continues the ids of the reply that it was sent on top of, with the template's words between the
turns, or it is rendered afresh, for a cause; every leaf is what the engine was shown and sampled; every sampled token of
a call that ended and that somebody received is trained exactly once, no other token ever.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gateway_support import CALCULATOR, Asked, Reply, Served, eventually, logprob, make_app
from tokenizer_families import FAMILIES, Unreachable
from transformers import PreTrainedTokenizerFast

from areal_agent.config import GatewayConfig
from areal_agent.errors import GatewayError
from areal_gateway.dialects.chat import ChatCompletions
from areal_gateway.exchange import Exchange
from areal_gateway.records import CallRecord, CallState
from areal_gateway.sessions import Session
from areal_gateway.tokens import Tokens
from areal_gateway.trajectories import fold

Message = dict[str, Any]
SEARCH: Any = {
    "type": "function",
    "function": {"name": "search", "description": "Finds pages.", "parameters": {"type": "object"}},
}
UNTHOUGHT = "<think>\n\n</think>\n\n"
WORDS = ("sum", " is", " five", ", naïve", " 漢字", " 12 34", "\nthen", "  ☃ ", ".", " x=1;")


@dataclass
class Known:
    """One call as the oracle knows it; `sent` are all messages of its request, `reply` None where none came."""

    record: CallRecord
    asked: Asked
    version: int
    sent: list[Message]
    tools: list[Any]
    reply: Message | None
    received: bool

    def told(self) -> tuple[Any, ...]:
        """The conversation as its reader can tell it from others: ids of tool calls apart."""
        reply = self.reply or {}
        calls = [c["function"] for c in reply.get("tool_calls") or []]
        return self.sent, self.tools, reply.get("content"), calls

    def ids(self) -> list[int]:
        return self.asked.prompt_ids + self.asked.output_ids


class Oracle:
    """Conversations as text. `end` closes a turn."""

    def __init__(self, folder: Path) -> None:
        self.hf = PreTrainedTokenizerFast.from_pretrained(str(folder))
        self.end = self.hf.eos_token
        self.qwen3 = "<think>" in self.hf.get_vocab()

    def text(self, messages: list[Message], tools: list[Any]) -> str:
        """The whole prompt, ready for a reply."""
        if not self.hf.chat_template:
            return chatml(messages, tools)
        text = self.hf.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        # The renderer's one deviation from Qwen3's template: a turn that was sampled without thinking keeps the
        # empty block of its prompt when it is history.
        return (
            re.sub(r"(<\|im_start\|>assistant\n)(?!<think>)", rf"\1{UNTHOUGHT}", text) if self.qwen3 else text
        )

    def after(self, messages: list[Message], tools: list[Any], new: int) -> str:
        """What follows the end of the turn before the last `new` messages; results in a row are one turn."""
        roles = [m["role"] for m in messages[-new:]]
        turns = sum(a != "tool" or b != "tool" for a, b in zip(["", *roles], roles, strict=False))
        pieces = self.text(messages, tools).split(self.end)
        return self.end.join(pieces[-turns - 1 :])


def chatml(messages: list[Message], tools: list[Any]) -> str:
    """Qwen3's template for a model that does not think, as Python."""
    out, rest = "", messages
    if messages[0]["role"] == "system" and not tools:
        out, rest = f"<|im_start|>system\n{messages[0]['content']}<|im_end|>\n", messages[1:]
    elif tools:
        first = ""
        if messages[0]["role"] == "system":
            first, rest = messages[0]["content"] + "\n\n", messages[1:]
        shown = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
        out = (
            f"<|im_start|>system\n{first}# Tools\n\nYou may call one or more functions to assist with the user query."
            "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            f"{shown}\n</tools>\n\nFor each function call, return a json object with function name and arguments "
            'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
            "<args-json-object>}\n</tool_call><|im_end|>\n"
        )
    for i, m in enumerate(rest):
        match m["role"]:
            case "tool":
                out += "" if i and rest[i - 1]["role"] == "tool" else "<|im_start|>user"
                out += f"\n<tool_response>\n{m['content']}\n</tool_response>"
                out += "" if rest[i + 1 : i + 2] and rest[i + 1]["role"] == "tool" else "<|im_end|>\n"
            case "assistant":
                calls = [
                    f'<tool_call>\n{{"name": "{c["function"]["name"]}", "arguments": {c["function"]["arguments"]}}}'
                    "\n</tool_call>"
                    for c in m.get("tool_calls") or []
                ]
                said = "\n".join([m["content"], *calls] if m.get("content") else calls)
                out += f"<|im_start|>assistant\n{UNTHOUGHT}{said}<|im_end|>\n"
            case role:
                out += f"<|im_start|>{role}\n{m['content']}<|im_end|>\n"
    return out + f"<|im_start|>assistant\n{UNTHOUGHT}"


class Play:
    """One session under random requests."""

    def __init__(self, served: Served, oracle: Oracle, session: Session, rng: random.Random) -> None:
        self.served, self.oracle, self.session, self.rng = served, oracle, session, rng
        self.calls: list[Known] = []
        self.bodies: list[tuple[dict[str, Any], list[str]]] = []
        """Requests that were answered, and their calls."""
        self.n = 0
        self.seen: Counter[str] = Counter()

    # what is said

    def unique(self, what: str) -> str:
        self.n += 1
        return f"{what} {self.n}"

    def reply(self, tools: list[Any]) -> Reply:
        """Text and calls, often in tokens as no tokeniser would cut them."""
        rng, encode = self.rng, self.served.fleet.encode
        text = self.unique("Reply") + "".join(rng.choices(WORDS, k=rng.randrange(6)))
        text = text.strip()
        ids = [t for c in text for t in encode(c)] if rng.random() < 0.5 else encode(text)
        for _ in range(rng.randrange(3) if tools else 0):
            name = rng.choice(tools)["function"]["name"]
            arguments = rng.choice(('{"expression":  "%d"}', '{"b": %d, "a": false}', '{"n":%d.0}')) % self.n
            ids += encode(f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
        if rng.random() < 0.9:
            return Reply(ids=ids + self.served.gateway.tokens.stop_token_ids[:1])
        return Reply(ids=ids[: rng.randint(1, len(ids))], finish="length")

    def echo(self, reply: Message) -> Message:
        """As a framework gives it back."""
        m = copy.deepcopy(reply)
        match self.rng.randrange(4):
            case 0:
                m |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
            case 1:
                m["content"] = [{"type": "text", "text": m["content"]}] if m["content"] else []
            case 2:
                for call in m.get("tool_calls") or []:
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(arguments, sort_keys=True)
        return m

    def onward(self, known: Known) -> list[Message]:
        """New messages on top of a reply."""
        assert known.reply is not None
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": self.unique("result")}
            for c in known.reply.get("tool_calls") or []
        ]
        if results and self.rng.random() < 0.8:
            return results
        return [*results, {"role": "user", "content": self.unique("And")}]

    # requests

    async def ask(
        self, sent: list[Message], tools: list[Any], parent: Known | None, causes: set[str], *, n: int = 1
    ) -> None:
        """`parent`: the call whose reply this goes on from; `causes`: why it may go on from none."""
        if self.rng.random() < 0.1:
            self.served.fleet.version += 1
        replies = [self.reply(tools) for _ in range(n)]
        self.served.fleet.say(*replies)
        body = {"messages": sent, "tools": tools, "n": n}
        exchange = await self.start(body)
        records = await exchange.wait()
        received = self.rng.random() < 0.9
        if received:
            self.served.gateway.sessions.delivered(self.session, [r.call_id for r in records])
        self.bodies.append((body, [r.call_id for r in records]))
        for record, asked in zip(records, self.served.fleet.asked[-n:], strict=True):
            known = Known(record, asked, self.served.fleet.version, sent, tools, record.reply, received)
            self.check(known, parent, causes)
            self.calls.append(known)

    async def start(self, body: dict[str, Any], retries: int = 0) -> Exchange:
        digest = hashlib.sha256(json.dumps(body).encode()).digest()
        calls = self.served.gateway.calls
        found = calls.find_retry(self.session, digest, retry_count=retries, retry_key=None)
        if found:
            return found
        request = ChatCompletions().read(body, self.session)
        return calls.start(self.session, request, digest, None, await calls.prepare(self.session, request))

    def check(self, known: Known, parent: Known | None, causes: set[str]) -> None:
        prompt, text = known.asked.prompt_ids, self.served.gateway.tokens.text
        self.seen[known.record.cause or "continued"] += 1
        plain = [ChatCompletions().read({"messages": [m]}, self.session).messages[0] for m in known.sent]
        if known.record.cause is None:
            assert parent is not None
            # Of several calls that were asked and said the same, any may be continued.
            asked, parent = parent, self.parent(known)
            assert parent is not None
            assert parent.told() == asked.told()
            stored = parent.ids()
            assert prompt[: len(stored)] == stored
            new = len(known.sent) - len(parent.sent) - 1
            closed = parent.asked.output_ids[-1:] == [self.oracle.hf.eos_token_id]
            expected = ("" if closed else self.oracle.end) + self.oracle.after(plain, known.tools, new)
            assert text(prompt[len(stored) :]) == expected
        else:
            assert known.record.cause in causes
            assert text(prompt) == self.oracle.text(plain, known.tools)

    # steps

    def tools(self) -> list[Any]:
        if not self.served.gateway.tokens.supports_tools:
            return []
        return self.rng.choice(([], [CALCULATOR], [CALCULATOR, SEARCH]))

    def answered(self) -> Known | None:
        choices = [k for k in self.calls if k.reply is not None]
        return self.rng.choice(choices) if choices else None

    async def root(self) -> None:
        """The first conversation, or a sub-agent's."""
        system = [{"role": "system", "content": self.unique("You are agent")}]
        sent = [*(system if self.rng.random() < 0.5 else []), {"role": "user", "content": self.unique("Ask")}]
        await self.ask(sent, self.tools(), None, {"root"}, n=self.rng.choice((1, 1, 2, 3)))

    async def turn(self) -> None:
        if (known := self.answered()) is None or known.reply is None:
            return await self.root()
        sent = [*known.sent, self.echo(known.reply), *self.onward(known)]
        await self.ask(sent, known.tools, known, set(), n=self.rng.choice((1, 1, 1, 2)))

    async def other_tools(self) -> None:
        known = self.answered()
        if known is None or known.reply is None or not self.served.gateway.tokens.supports_tools:
            return await self.turn()
        tools = [t for t in (CALCULATOR, SEARCH) if [t] != known.tools][:1]
        sent = [*known.sent, self.echo(known.reply), *self.onward(known)]
        # A call further back may have had these tools; what was said since is no news that can be bridged.
        await self.ask(sent, tools, None, {"tools_changed", "bridge_refused"})

    async def edit(self) -> None:
        if (known := self.answered()) is None:
            return await self.root()
        told = {"role": "assistant", "content": self.unique("Never said")}
        sent = [*known.sent, told, {"role": "user", "content": self.unique("So")}]
        # What was said before the forged turn may be continued, by a renderer that takes forged turns.
        await self.ask(sent, known.tools, self.parent(known), {"edited", "bridge_refused", "tools_changed"})

    def parent(self, known: Known) -> Known | None:
        return next((k for k in self.calls if k.record.call_id == known.record.parent_id), None)

    async def compact(self) -> None:
        if (known := self.answered()) is None:
            return await self.root()
        summary = {"role": "user", "content": self.unique("So far")}
        await self.ask([known.sent[0], summary], known.tools, None, {"compacted", "root", "edited"})

    async def retry(self) -> None:
        """An SDK asks again: the same reply, and no work for the engine."""
        if not self.bodies:
            return await self.root()
        body, call_ids = self.rng.choice(self.bodies)
        before = len(self.served.fleet.asked)
        same = {c for b, ids in self.bodies if b == body for c in ids}
        records = await (await self.start(copy.deepcopy(body), retries=1)).wait()
        assert {r.call_id for r in records} <= same
        assert len(records) == len(call_ids)
        assert len(self.served.fleet.asked) == before
        self.seen["retried"] += 1

    async def sibling(self) -> None:
        """The same prompt again, without a word of a retry."""
        if not self.calls:
            return await self.root()
        known = self.rng.choice(self.calls)
        await self.ask(known.sent, known.tools, self.parent(known), {known.record.cause or "", "root"})
        again = self.calls[-1]
        if again.record.parent_id == known.record.parent_id:
            assert again.asked.prompt_ids == known.asked.prompt_ids

    async def cancel(self) -> None:
        """The client leaves in the middle of a reply."""
        fleet, before = self.served.fleet, len(self.served.fleet.asked)
        fleet.say(Reply(self.unique("cut short"), chunk=1, delay_s=0.003))
        sent = [{"role": "user", "content": self.unique("Never mind")}]
        exchange = await self.start({"messages": sent})
        wanted = self.rng.randrange(3)
        await eventually(lambda: len(fleet.asked) > before and len(fleet.asked[-1].output_ids) >= wanted)
        exchange.abort(GatewayError("the client left", status=499, code="client_left"))
        assert exchange.task is not None
        await asyncio.wait([exchange.task])
        record = self.session.history.calls[-1]
        if exchange.error is None:
            return self.calls.append(
                Known(record, fleet.asked[-1], fleet.version, sent, [], record.reply, False)
            )
        assert record.state is CallState.ABORTED
        self.calls.append(Known(record, fleet.asked[-1], fleet.version, sent, [], None, False))
        self.seen["aborted"] += 1

    async def play(self, steps: int) -> None:
        moves = (self.root, self.turn, self.turn, self.turn, self.turn, self.retry, self.sibling, self.edit)
        for _ in range(steps):
            await self.rng.choice((*moves, self.compact, self.other_tools, self.cancel))()
        self.check_trajectory()

    def check_trajectory(self) -> None:
        known = {k.record.call_id: k for k in self.calls}
        assert set(known) == {c.call_id for c in self.session.history.calls}
        parents = {k.record.parent_id for k in self.calls}
        trained: Counter[str] = Counter()
        for sequence in fold(self.session.history, 1.0).sequences:
            leaf = known[sequence.call_ids[-1]]
            assert list(sequence.token_ids) == leaf.ids()
            loss = [False] * len(sequence.token_ids)
            for call_id in sequence.call_ids:
                k = known[call_id]
                start, end = len(k.asked.prompt_ids), len(k.ids())
                assert leaf.ids()[:end] == k.ids()
                expected = [logprob(k.asked.prompt_ids, i) for i in range(end - start)]
                assert list(sequence.logprobs)[start:end] == expected
                assert list(sequence.versions)[start:end] == [k.version] * (end - start)
                mask = list(sequence.loss_mask)[start:end]
                assert len(set(mask)) <= 1
                trained[call_id] += all(mask)
                loss[start:end] = mask
            assert list(sequence.loss_mask) == loss
        received = {
            call_id
            for call_id, k in known.items()
            if k.reply is not None and (k.received or call_id in parents)
        }
        assert {c for c, n in trained.items() if n} == received
        assert all(trained[c] == 1 for c in received)


async def run(family: str, folder: Path, sessions: int) -> Counter[str]:
    try:
        model = FAMILIES[family](folder / family)
    except Unreachable as e:
        pytest.skip(f"the tokenizer cannot be fetched, and .cache does not hold it: {e}")
    served = make_app(Tokens.load(model, GatewayConfig()), folder)
    oracle, seen = Oracle(model), Counter()
    await served.start()
    try:
        for i in range(sessions):
            session = await served.open(task_id=f"t{i}")
            opened = served.gateway.sessions.get_open(session["session_id"])
            assert opened is not None
            play = Play(served, oracle, opened, random.Random(f"{family} {i}"))
            await play.play(play.rng.randint(4, 14))
            seen += play.seen
            served.fleet.asked.clear()
            await served.seal(session, reward=1.0)
    finally:
        await served.stop()
    return seen


def complain_of_what_never_happened(seen: Counter[str], tools: bool) -> None:
    happened = {"root", "continued", "edited", "compacted", "retried", "aborted"}
    assert happened | ({"tools_changed"} if tools else set()) <= set(seen)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
async def test_random_trees(family: str, tmp_path: Path) -> None:
    seen = await run(family, tmp_path, 50)
    print(family, dict(seen))
    complain_of_what_never_happened(seen, tools=family.startswith("qwen3"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_thousand_random_trees(family: str, tmp_path: Path) -> None:
    seen = await run(family, tmp_path, 1000)
    print(family, dict(seen))
    complain_of_what_never_happened(seen, tools=family.startswith("qwen3"))
