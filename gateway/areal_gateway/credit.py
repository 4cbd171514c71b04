"""Who earned what: the rewards of a session folded into one for it and one for each of its calls.

Invariant: the fold reads the append-only rewards and the call tree, never the time at which calls ran, so
what a sub-agent's branch earned reaches no other branch. Missing is not 0: where nothing was ever given, the
value is None.

Of the rewards about one thing (the session, a call, a label), a key counts once, with its last value; the
keys' values are then combined by `rewards.rule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_agent.config import RunConfig
from areal_gateway.records import REPLIED, CallRecord, RewardRecord, SessionHistory

REWARD = "reward"
"""The name of the rewards that are trained on; others are kept and shown."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The run's rules: how rewards combine, how far they reach back, and which calls are trained."""

    rule: str = "last"
    turn_discount: float = 1.0
    train_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig) -> Credit:
        return cls(config.rewards.rule, config.rewards.turn_discount, config.rollout.train_labels)

    def trains(self, call: CallRecord, session_labels: Mapping[str, str]) -> bool:
        """Whether the call's labels (its own, else the session's) are among those to be trained."""
        labels = {**session_labels, **call.labels}
        return all(name in labels and labels[name] in values for name, values in self.train_labels.items())

    def combine(self, rewards: Iterable[RewardRecord]) -> tuple[str, float | None]:
        """(state, value) of rewards about one thing, oldest first: `pending` without any, `missing` or `set`."""
        last: dict[str, float | None] = {}
        for r in rewards:
            last.pop(r.key, None)  # so that the order is that of the last values
            last[r.key] = r.value
        if not last:
            return "pending", None
        values = list(last.values())
        if self.rule == "last":
            value = values[-1]
        else:
            known = [v for v in values if v is not None]
            value = sum(known) if known else None
        return ("missing", None) if value is None else ("set", value)

    def of_session(self, history: SessionHistory) -> tuple[str, float | None]:
        """(state, value). A session with no reward of its own has earned the sum of what its calls earned.

        Sealed without either, it is missing.
        """
        state, value = self.combine(r for r in _named(history) if r.about_session)
        if state == "pending":
            earned = [v for _, v in self.of_calls(history).values() if v is not None]
            if earned:
                state, value = "set", sum(earned)
            elif history.seal is not None:
                state = "missing"
        return state, value

    def of_calls(self, history: SessionHistory) -> dict[str, tuple[str, float | None]]:
        """call id -> (state, value) of what was said of the call itself, by its id and by its labels (added)."""
        about_calls: dict[str, list[RewardRecord]] = {}
        about_labels: dict[tuple[tuple[str, str], ...], list[RewardRecord]] = {}
        for r in _named(history):
            if r.call_id is not None:
                about_calls.setdefault(r.call_id, []).append(r)
            elif r.labels:
                about_labels.setdefault(tuple(sorted(r.labels.items())), []).append(r)
        out = {}
        for call in history.calls:
            replied = (
                call.state in REPLIED
            )  # one that failed is asked again: labels are of the one that counts
            labels = {**history.session.labels, **call.labels}.items()
            found = [self.combine(about_calls.get(call.call_id, ()))]
            found += [
                self.combine(rs)
                for wanted, rs in about_labels.items()
                if replied and set(wanted) <= set(labels)
            ]
            known = [v for _, v in found if v is not None]
            if known:
                out[call.call_id] = "set", sum(known)
            elif history.seal is not None or any(state == "missing" for state, _ in found):
                out[call.call_id] = "missing", None
            else:
                out[call.call_id] = "pending", None
        return out

    def returns(self, history: SessionHistory, reward: float | None) -> dict[str, float | None]:
        """call id -> its own reward + turn_discount × the mean return of the calls that continue it.

        The session's own `reward` is earned at the end of every branch. Several continuations of a call are
        samples of what may follow it; their mean is its estimate (a Monte Carlo return). One that got no reply
        continues nothing. A call about which, and after which, nothing was said has None.
        """
        given = self.combine(r for r in _named(history) if r.about_session)[1]
        at_leaf = reward if given is not None else None  # else it is the calls' own, counted there
        own = self.of_calls(history)
        children: dict[str, list[str]] = {}
        for call in history.calls:
            if call.parent_id is not None and call.state in REPLIED:
                children.setdefault(call.parent_id, []).append(call.call_id)
        out: dict[str, float | None] = {}
        for call in reversed(history.calls):  # a call is recorded after the one it continues
            after = children.get(call.call_id)
            later = [v for c in after if (v := out[c]) is not None] if after else []
            parts = [own[call.call_id][1]]
            if later:
                parts.append(self.turn_discount * sum(later) / len(later))
            elif not after and call.state in REPLIED:
                parts.append(at_leaf)
            known = [p for p in parts if p is not None]
            out[call.call_id] = sum(known) if known else None
        return out


def _named(history: SessionHistory) -> Iterable[RewardRecord]:
    return (r for r in history.rewards if r.name == REWARD)
