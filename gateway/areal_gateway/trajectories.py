"""The fold: one session's calls -> the token sequences that are trained.

Invariant: every sampled token of a trainable call carries loss in exactly one sequence; no other token
carries any. The columns hold what the engine saw and sampled, in that order: nothing is re-tokenised.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_agent.trajectory import NOT_SAMPLED, Sequence, Trajectory
from areal_gateway.credit import Credit
from areal_gateway.records import EXACT, CallRecord, SessionHistory

DEFAULT = Credit()
"""Every call is trained, and the last reward counts."""


def fold(history: SessionHistory, reward: float | None, credit: Credit = DEFAULT) -> Trajectory:
    """Sequences are the branches root -> leaf of the session's call tree, in the order of their leaves.

    A call is trained when it ended `complete` or `truncated`, the agent got the reply (its last byte was
    delivered, or a later call continues it), and its labels are among those to be trained. Other calls are
    context where a trained call continues them, else they are left out. A reply that several branches share
    carries loss in the first of them. Where trained calls of a branch were sampled at different temperatures, there
    is a sequence for each temperature, up to the last call that it trains: a sequence has one.
    Raises ValueError when the ledger's ids do not fit together.
    """
    calls = {c.call_id: c for c in history.calls}
    trainable = trainable_calls(history, credit)
    needed = set()
    for call_id in trainable:
        at: str | None = call_id
        while at is not None and at not in needed:
            needed.add(at)
            at = calls[at].parent_id
    inner = {calls[c].parent_id for c in needed}

    session = history.session
    own, returns = credit.of_calls(history), credit.returns(history, reward)
    taken: set[str] = set()
    sequences = []
    for leaf in history.calls:
        if leaf.call_id not in needed or leaf.call_id in inner:
            continue
        branch = _branch(calls, leaf)
        trained = [c.call_id in trainable and c.call_id not in taken for c in branch]
        taken.update(c.call_id for c in branch)
        for temperature, path, loss in _by_temperature(branch, trained):
            columns = _columns(path, loss)
            sequences.append(
                Sequence(
                    *columns,
                    temperature=temperature,
                    reward=reward,
                    session_id=session.session_id,
                    group_id=session.group_id,
                    task_id=session.task_id,
                    call_ids=tuple(c.call_id for c in path),
                    call_ends=tuple(c.prompt_length + len(c.output_ids) for c in path),
                    call_rewards=tuple(own[c.call_id][1] for c in path),
                    call_returns=tuple(returns[c.call_id] for c in path),
                    call_labels=tuple({**session.labels, **c.labels} for c in path),
                )
            )
    return Trajectory(session.session_id, session.group_id, session.task_id, reward, tuple(sequences))


def trainable_calls(history: SessionHistory, credit: Credit = DEFAULT) -> set[str]:
    """Ids of the calls whose sampled tokens are trained."""
    continued = {c.parent_id for c in history.calls}
    return {
        c.call_id
        for c in history.calls
        if c.state in EXACT
        and c.output_ids
        and (c.call_id in history.delivered or c.call_id in continued)
        and credit.trains(c, history.session.labels)
    }


def _branch(calls: dict[str, CallRecord], leaf: CallRecord) -> list[CallRecord]:
    """Root first."""
    path = [leaf]
    while path[-1].parent_id is not None:
        path.append(calls[path[-1].parent_id])
    path.reverse()
    return path


def _by_temperature(
    branch: list[CallRecord], trained: list[bool]
) -> Iterator[tuple[float, list[CallRecord], list[bool]]]:
    """(temperature, calls, which of them it trains) for each temperature that trained calls have."""
    temperatures = list(dict.fromkeys(c.temperature for c, t in zip(branch, trained, strict=True) if t))
    if len(temperatures) == 1:
        yield temperatures[0], branch, trained
        return
    for temperature in temperatures:
        own = [t and c.temperature == temperature for c, t in zip(branch, trained, strict=True)]
        end = len(own) - own[::-1].index(True)
        yield temperature, branch[:end], own[:end]


def _columns(
    branch: list[CallRecord], trained: list[bool]
) -> tuple[list[int], list[float], list[int], list[bool]]:
    """(token_ids, logprobs, versions, loss_mask), each [L]."""
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    mask: list[bool] = []
    for call, train in zip(branch, trained, strict=True):
        if call.shared != len(ids):
            raise ValueError(
                f"call {call.call_id} continues {call.shared} tokens, but its parent has {len(ids)}"
            )
        n, m = len(call.suffix_ids), len(call.output_ids)
        ids += call.suffix_ids
        ids += call.output_ids
        mask += [False] * n + [train] * m
        if call.state in EXACT:
            logprobs += [0.0] * n
            logprobs += call.logprobs
            versions += [NOT_SAMPLED] * n
            for start, end, version in call.spans:
                versions += [version] * (end - start)
        else:
            logprobs += [0.0] * (n + m)
            versions += [NOT_SAMPLED] * (n + m)
    return ids, logprobs, versions, mask
