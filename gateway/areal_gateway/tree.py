"""The calls of one session as a tree: which stored call does a new request continue?

Invariant: a call's prompt ids are its parent's prompt ids, then its parent's sampled ids, then new ids,
exactly; where that cannot be had the call is a root, with the cause. The tree only attaches; it renders
nothing and samples nothing. `attach` changes nothing (prepare); `add` does, once a call ended (commit).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from areal_gateway import canonical
from areal_gateway.records import REPLIED, CallRecord


class Cause(StrEnum):
    """Why a call extends no other."""

    ROOT = "root"
    """A conversation of its own: the first one, a sub-agent, a side call such as naming a chat."""
    EDITED = "edited"
    """It shares a beginning with a stored conversation, then tells the history differently."""
    COMPACTED = "compacted"
    """It shares a beginning with a stored conversation, and leaves the replies out."""
    TOOLS_CHANGED = "tools_changed"
    """Its messages extend a stored call, but the tools differ; they are part of the prompt."""
    BRIDGE_REFUSED = "bridge_refused"
    """Its messages extend a stored call, but the renderer cannot continue those ids exactly."""


@dataclass(frozen=True, slots=True)
class Node:
    """A call that was given a reply, with the key of its conversation including that reply."""

    record: CallRecord
    parent: Node | None
    key: bytes
    tools_key: bytes
    length: int
    """Messages of the conversation, the reply included."""

    def prompt_ids(self) -> array[int]:
        return (self.parent.ids() if self.parent else array("i")) + self.record.suffix_ids

    def ids(self) -> array[int]:
        """Prompt and sampled ids: what a child's prompt must begin with."""
        out = array("i")
        for node in reversed(list(self.ancestry())):
            out += node.record.suffix_ids
            out += node.record.output_ids
        return out

    def ancestry(self) -> Iterator[Node]:
        """This node, its parent, ... up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a request belongs. `parent` None: a root because of `cause`.

    `keys` is the request's chain; `new_messages` are those beyond the parent's conversation.
    """

    parent: Node | None
    cause: Cause | None
    keys: list[bytes]
    tools_key: bytes
    messages: list[dict[str, Any]]

    @property
    def new_messages(self) -> list[dict[str, Any]]:
        return self.messages[self.parent.length if self.parent else 0 :]

    def detached(self, cause: Cause) -> Attachment:
        """The same request as a root."""
        return Attachment(None, cause, self.keys, self.tools_key, self.messages)


class CallTree:
    """All calls of one session that a later call may continue."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Node]] = {}
        self._by_id: dict[str, Node] = {}
        self._seen: set[bytes] = set()
        self._longest = 0
        self._asked: Counter[bytes] = Counter()
        self._chained: tuple[int, int, bytes, list[bytes]] = (0, 0, b"", [canonical.ROOT])
        """Of the request that was attached last: how many messages, the bytes of their JSON without the closing
        bracket, SHA-256 of those, and the messages' chain."""
        self.changes = 0
        """Grows whenever an attachment made before may no longer be the right one."""

    def ask(self, attachment: Attachment, n: int) -> int:
        """Note that a prompt is asked for `n` times more; how often it was before (its first sibling's number)."""
        prompt = attachment.keys[-1] + attachment.tools_key
        before = self._asked[prompt]
        self._asked[prompt] += n
        return before

    def nodes(self) -> Iterator[Node]:
        """Every call that can be continued, in the order they ended: a parent before its children."""
        return iter(list(self._by_id.values()))

    def node(self, call_id: str) -> Node | None:
        return self._by_id.get(call_id)

    def depth(self, keys: list[bytes]) -> int:
        """Messages of the deepest stored conversation that a request with this chain extends; 0: none."""
        return next((n for n in range(len(keys) - 2, 0, -1) if self._by_key.get(keys[n])), 0)

    def attach(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], after: str | None = None
    ) -> Attachment:
        """Attach a request to the deepest stored call whose conversation it extends by at least one message.

        Of several calls with that same conversation (siblings that happened to say the same) it is the one
        of the exchange `after`, else the one whose tool-call ids the request repeats, else the latest.
        """
        keys = self._chain(messages)
        tools_key = canonical.tools_key(tools)
        other_tools = False
        for length in range(len(messages) - 1, 0, -1):
            candidates = self._by_key.get(keys[length])
            if not candidates:
                continue
            same = [n for n in candidates if n.tools_key == tools_key]
            if not same:
                other_tools = True
                continue
            ids = canonical.tool_call_ids(messages[length - 1])
            named = [n for n in same if ids and canonical.tool_call_ids(n.record.reply or {}) == ids]
            told = [n for n in same if after is not None and n.record.exchange_id == after]
            return Attachment((told or named or same)[-1], None, keys, tools_key, messages)
        cause = Cause.TOOLS_CHANGED if other_tools else self._cause(messages, keys)
        return Attachment(None, cause, keys, tools_key, messages)

    def _chain(self, messages: list[dict[str, Any]]) -> list[bytes]:
        """As `canonical.chain`. Most requests are the last one with a few messages more: to see that by the bytes of
        its JSON takes a quarter to a third of reducing and hashing message by message."""
        n, size, digest, keys = self._chained
        whole = orjson.dumps(messages)  # "[", messages with commas between them, "]"
        said = hashlib.sha256(whole[:size])
        if said.digest() != digest or whole[size : size + 1] not in (b",", b"]"):
            n, size, keys, said = 0, 0, [canonical.ROOT], hashlib.sha256()
        said.update(whole[size:-1])
        keys = [*keys, *canonical.chain(messages[n:], keys[-1])[1:]]
        self._chained = len(messages), len(whole) - 1, said.digest(), keys
        return keys

    def _cause(self, messages: list[dict[str, Any]], keys: list[bytes]) -> Cause:
        shared = max((i for i, key in enumerate(keys) if key in self._seen), default=0)
        if shared == 0 or shared == len(messages):  # nothing known, or the very prompt of another call
            return Cause.ROOT
        rest = messages[shared:]
        if any(canonical.role_of(m) == "assistant" for m in rest):
            return Cause.EDITED
        asked = any(canonical.role_of(m) == "user" for m in messages[:shared])
        if asked and len(messages) < self._longest:
            return Cause.COMPACTED
        return Cause.ROOT

    def add(self, record: CallRecord, attachment: Attachment) -> Node | None:
        """Remember an ended call; None when it was given no reply, so that nothing can continue it."""
        self.changes += 1
        self._seen.update(attachment.keys[1:])
        if record.state not in REPLIED or record.reply is None:
            return None
        key = canonical.extend(attachment.keys[-1], record.reply)
        node = Node(record, attachment.parent, key, attachment.tools_key, len(attachment.messages) + 1)
        self._by_key.setdefault(key, []).append(node)
        self._by_id[record.call_id] = node
        self._seen.add(key)
        self._longest = max(self._longest, node.length)
        return node

    def remove(self, call_id: str) -> None:
        """Forget a call that nothing may continue after all; one that is not there is none of them."""
        if (node := self._by_id.pop(call_id, None)) is not None:
            self.changes += 1
            self._by_key[node.key].remove(node)

    def restore(self, record: CallRecord) -> None:
        """Add a call read back from the ledger; its parent must have been restored before."""
        parent = self._by_id.get(record.parent_id) if record.parent_id else None
        before = conversation(parent) if parent else []
        messages = [*before, *record.messages]
        attachment = Attachment(
            parent,
            Cause(record.cause) if record.cause else None,
            canonical.chain(messages),
            canonical.tools_key(record.tools),
            messages,
        )
        self.ask(attachment, 1)
        self.add(record, attachment)


def conversation(node: Node) -> list[dict[str, Any]]:
    """All messages of a call's conversation, its reply last."""
    out: list[dict[str, Any]] = []
    for n in reversed(list(node.ancestry())):
        out.extend(n.record.messages)
        out.append(n.record.reply or {})
    return out
