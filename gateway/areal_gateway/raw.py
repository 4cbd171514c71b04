"""Raw prompts, which are no conversation: text or token ids that continue an earlier raw call, or do not.

Invariant: a prompt whose beginning is, to the letter or to the id, what an earlier call was asked and
sampled, begins with that call's ids; only what follows is tokenised. Anything else is a root, with its cause.

In the tree and the ledger a raw prompt is a message of the role `prompt` that holds what is new in it.
"""

from __future__ import annotations

from array import array
from typing import Any

from areal_gateway import canonical
from areal_gateway.exchange import Prompt
from areal_gateway.records import ints
from areal_gateway.tokens import Tokens
from areal_gateway.tree import Attachment, CallTree, Cause, Node, conversation

ROLE = "prompt"


def place_raw(tokens: Tokens, tree: CallTree, prompt: Prompt) -> tuple[Attachment, array[int], int]:
    """(attachment, prompt ids, how many of them are the parent's)."""
    parent, at, shown = _deepest(tokens, tree, prompt)
    rest = prompt[at:]
    fresh = tokens.tokenizer.encode(rest, add_special_tokens=False) if isinstance(rest, str) else list(rest)
    before = parent.ids() if parent else array("i")
    message = {"role": ROLE, "content": rest if isinstance(rest, str) else tokens.text(fresh)}
    messages = [*(conversation(parent) if parent else ()), message]
    cause = None if parent else Cause.BRIDGE_REFUSED if shown else Cause.ROOT
    attachment = Attachment(parent, cause, canonical.chain(messages), canonical.tools_key([]), messages)
    return attachment, before + ints(fresh), len(before)


def _deepest(tokens: Tokens, tree: CallTree, prompt: Prompt) -> tuple[Node | None, int, bool]:
    """(the deepest call that `prompt` extends, where it ends in it, whether it extends what some call showed, and no more).

    A call shows less than it sampled: not the token that ended it. A prompt that goes on right after what
    was shown cannot begin with the ids.
    """
    ends: dict[str, int] = {}
    best: Node | None = None
    at = 0
    shown = False
    for node in tree.nodes():
        asked = node.record.messages
        if not asked or asked[-1].get("role") != ROLE:
            continue
        start = ends.get(node.parent.record.call_id) if node.parent else 0
        if start is None:
            continue
        question, said, visible = _pieces(tokens, node, prompt)
        if not _has(prompt, question, start):
            continue
        end = start + len(question)
        if not _has(prompt, said, end):
            shown = shown or (bool(visible) and _has(prompt, visible, end))
            continue
        end += len(said)
        ends[node.record.call_id] = end
        if at <= end < len(prompt):
            best, at = node, end
    return best, at, shown


def _pieces(tokens: Tokens, node: Node, prompt: Prompt) -> tuple[Any, Any, Any]:
    """What a call added to its parent: its question, all that it sampled, and of that what was shown."""
    record = node.record
    output = list(record.output_ids)
    if isinstance(prompt, str):
        return record.messages[-1]["content"], tokens.text(output), (record.reply or {}).get("content") or ""
    return tuple(record.suffix_ids), tuple(output), tuple(tokens.body(output))


def _has(prompt: Prompt, piece: Any, at: int) -> bool:
    return prompt[at : at + len(piece)] == piece
