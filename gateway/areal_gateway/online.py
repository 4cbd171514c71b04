"""Online mode: somebody else's service under one project key, its conversations told apart into sessions.

Invariant: a call under the project key is never refused for want of a session. It joins the open session that
its `x-areal-session` header names, or else the one whose conversation it continues, or else opens one. A
session is closed by its reward or by idling; a name that was closed begins a new session.

Sessions are put into cohorts of `rollout.group_size` in the order they are opened, and a cohort is a group: what
a session's reward is compared with is the mean of its cohort, a moving baseline over recent traffic. (One
conversation cannot be sampled again, so there is no group of one task. Every session of a cohort was opened
before any reward of it was known, so the baseline does not depend on what it is subtracted from, up to the
session's own share of the mean.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from areal_agent.config import RunConfig
from areal_agent.errors import GatewayError
from areal_gateway import canonical
from areal_gateway.exchange import CallRequest, exchange_id_of
from areal_gateway.feedback import give
from areal_gateway.ledger import Ledger
from areal_gateway.plain import Incoming, readable
from areal_gateway.records import Outcome, Sampling, SessionRecord
from areal_gateway.sessions import Session, Sessions

SESSION_HEADER = "x-areal-session"
TASK = "online:"
"""How the task ids of online sessions begin; the name follows, where the service gave one."""

NAME_CHARS = 256


class Online:
    """The project key's door to the sessions. All methods run on the event loop."""

    def __init__(
        self, config: RunConfig, sessions: Sessions, ledger: Ledger, version: Callable[[], int]
    ) -> None:
        """Call after the sessions were restored: a cohort that was being filled goes on being filled."""
        self._config = config
        self._sessions = sessions
        self._ledger = ledger
        self._version = version
        self._opening = asyncio.Lock()
        self._named: dict[str, str] = {}
        """Name -> id of its latest session, which may have been sealed since."""
        self._cohort, self._members = f"coh_{uuid4().hex}", 0
        for record, _ in ledger.sessions():
            if record.task_id.startswith(TASK) and record.group_id.startswith("coh_"):
                same = record.group_id == self._cohort
                self._cohort, self._members = record.group_id, self._members + 1 if same else 1
        for session in self._open():
            if name := session.record.task_id.removeprefix(TASK):
                self._named[name] = session.id

    def _open(self) -> Iterable[Session]:
        """Those that take calls, newest first."""
        return (
            s for s in reversed(self._sessions.running()) if s.record.task_id.startswith(TASK) and goes_on(s)
        )

    # -- calls -------------------------------------------------------------------------------------

    def conversation(self, exchange_id: str) -> list[dict[str, Any]] | None:
        """As `Session.conversation`, in whichever session it is: what `previous_response_id` refers to."""
        session = self._of_exchange(exchange_id)
        return session.conversation(exchange_id) if session else None

    async def session_for(self, asked: CallRequest, digest: bytes, request: Incoming) -> Session:
        """The session a call belongs to, opened where there is none."""
        async with self._opening:
            name = name_of(request)
            found = self.find(asked, digest, request)
            # A client that leaves now must not leave a session behind that its name does not lead to.
            return found or await asyncio.shield(asyncio.ensure_future(self._begin(name)))

    def find(self, asked: CallRequest, digest: bytes, request: Incoming) -> Session | None:
        if name := name_of(request):
            session = self._sessions.get_open(self._named.get(name, ""))
            return session if session is not None and goes_on(session) else None
        if asked.after and (session := self._of_exchange(asked.after)):
            return session
        retries = request.headers.get("x-stainless-retry-count", "0") != "0"
        if retries or "Idempotency-Key" in request.headers:
            for session in self._open():
                if digest in session.exchanges:
                    return session
        return self._of_conversation(asked.messages)

    def _of_conversation(self, messages: list[dict[str, Any]]) -> Session | None:
        """The newest open session with the longest conversation that `messages` extends."""
        keys = canonical.chain(messages)
        best, deepest = None, 0
        for session in self._open():
            if (depth := session.tree.depth(keys)) > deepest:
                best, deepest = session, depth
        return best

    def _of_exchange(self, exchange_id: str) -> Session | None:
        for session in self._open():
            if any(exchange_id in (c.exchange_id, c.call_id) for c in session.history.calls):
                return session
        return None

    async def _begin(self, name: str) -> Session:
        if self._members >= self._config.rollout.group_size:
            self._cohort, self._members = f"coh_{uuid4().hex}", 0
        run = self._config.sampling
        session, _ = await self._sessions.open(
            task_id=TASK + name,
            group_id=self._cohort,
            group_size=self._config.rollout.group_size,
            purpose="train",
            sampling=Sampling(run.temperature, run.top_p, run.top_k, run.max_tokens),
            deadline_s=self._config.online.deadline_s,
            labels={},
            version=self._version(),
        )
        self._members += 1  # not before: one that could not be opened fills no place
        if name:
            self._drop_sealed_names()
            self._named[name] = session.id
        return session

    def _drop_sealed_names(self) -> None:
        """Names of sealed sessions are in the ledger; memory keeps about as many as are open."""
        if len(self._named) > 2 * self._sessions.open_count + 64:
            self._named = {n: i for n, i in self._named.items() if self._sessions.get_open(i)}

    def blank(self) -> Session:
        """An empty session that is nowhere: what a count of tokens is made in when nothing is continued."""
        run = self._config.sampling
        sampling = Sampling(run.temperature, run.top_p, run.top_k, run.max_tokens)
        record = SessionRecord("", b"", TASK, "", 1, "rollout", sampling, 1e9, {}, 0, time.time(), 0)
        return Session(record)

    # -- rewards -----------------------------------------------------------------------------------

    async def reward(self, body: dict[str, Any], request: Incoming) -> str:
        """Feedback of the service on a reply (`response_id`) or on a session (the header); the session's id.

        A reward of the session closes it when `online.close_on_reward` says so; one of a reply leaves it open,
        unless `final` is true. The same reward again, under its key, changes nothing, also after the close.
        """
        session_id = await self._subject(body, request)
        history = await give(self._sessions, session_id, body)
        whole = not any(body.get(field) for field in ("response_id", "call_id", "labels"))
        if body.get("final") is True or (whole and self._config.online.close_on_reward):
            await self._sessions.seal(history.session.session_id, Outcome.FINISHED, None)
        return session_id

    async def _subject(self, body: dict[str, Any], request: Incoming) -> str:
        if isinstance(response_id := body.get("response_id"), str) and response_id:
            exchange_id = exchange_id_of(response_id)
            if session := self._of_exchange(exchange_id):
                return session.id
            found = await asyncio.to_thread(self._ledger.session_of_exchange, exchange_id, TASK)
        elif name := name_of(request):
            found = self._named.get(name) or await asyncio.to_thread(
                self._ledger.latest_session_of_task, TASK + name
            )
        else:
            raise GatewayError(
                f"name what the reward is for: response_id, or the session in the header {SESSION_HEADER}",
                status=400,
                code="invalid_request",
            )
        if found is None:
            raise GatewayError(
                "no online session has that reply or name", status=404, code="unknown_response"
            )
        return found


def goes_on(session: Session) -> bool:
    """Whether it takes calls: past its deadline it only waits for rewards."""
    return session.sealing is None and time.time() < session.deadline


def name_of(request: Incoming) -> str:
    return readable(request.headers.get(SESSION_HEADER, "")).strip()[:NAME_CHARS]
