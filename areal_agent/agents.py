"""The forms an agent may come in, behind one call: run it on a task, inside a session.

Invariant: the agent's own code is not changed and need not know of training; what it wants of the
session it asks for by name (`session`, `base_url`, `api_key`, `http_client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from areal_agent.errors import AgentError, ConfigError
from areal_agent.launch import guard
from areal_agent.observe import Binding, bind
from areal_agent.session import Session
from areal_agent.userland import Userland

COMMAND_GRACE_S = 2.0
"""What a command that ran out of time gets between SIGTERM and SIGKILL."""

OFFERS = ("session", "base_url", "api_key", "http_client")


class Command:
    """A shell command as the agent: the task as JSON on stdin, the result is what it prints.

    Its environment holds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and
    AREAL_SESSION_ID of its session. It ends, with everything it started, when its session does.

        areal_agent.train(areal_agent.Command("node my_agent.js"), reward, ...)
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        """Args:
        command: a command line (split as a shell would, no shell is started), or its arguments.
        env: added to the environment.

        Raises ConfigError for an empty command.
        """
        self.argv = shlex.split(command) if isinstance(command, str) else [str(a) for a in command]
        if not self.argv:
            raise ConfigError("Command('') is empty; give it a command line such as 'python my_agent.py'")
        self.env = dict(env or {})
        self.cwd = cwd

    def __repr__(self) -> str:
        return f"Command({shlex.join(self.argv)!r})"

    async def __call__(self, task: Mapping[str, Any], *, session: Session) -> str:
        """Raises AgentError with the end of its stderr when it exits with another code than 0."""
        read, write = os.pipe()  # the lifeline: closing `write` ends the command's whole tree
        process = None
        try:
            options = ["--grace", str(COMMAND_GRACE_S), "--lifeline", str(read)]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, *options, "--", *self.argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **session_environment(session), **self.env},
                cwd=self.cwd,
                pass_fds=(read,),
                start_new_session=True,
            )
            out, err = await process.communicate(json.dumps(task).encode())
        finally:
            os.close(read)
            os.close(write)
            if process is not None and process.returncode is None:  # cancelled: it ends within its grace
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COMMAND_GRACE_S + guard.LEFTOVER_GRACE_S):
                        await process.wait()
        assert process is not None  # it was started, or that raised
        if process.returncode != 0:
            raise AgentError(
                f"{self!r} ended with code {process.returncode}: {err.decode(errors='replace').strip()[-1000:]}"
            )
        return out.decode(errors="replace").strip()


def session_environment(session: Session) -> dict[str, str]:
    """What points any SDK of a child process at the session."""
    origin = session.base_url.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": origin,
        "ANTHROPIC_API_KEY": session.api_key,
        "AREAL_SESSION_ID": session.id,
    }


class AgentRunner:
    """Runs one agent, of whatever form, for many sessions at once."""

    def __init__(self, agent: Any) -> None:
        """Raises ConfigError when it is none of the forms, or cannot be called as agent(task)."""
        if inspect.isclass(agent):
            raise ConfigError(f"the agent is the class {agent.__name__}; pass an instance of it")
        run = None if inspect.isroutine(agent) else getattr(agent, "run", None)
        if callable(run):
            agent = run  # AReaL's contract: async def run(self, data, **extra_kwargs)
        self._user = Userland(agent, "agent", ("task",), OFFERS)

    async def run(self, task: Mapping[str, Any], session: Session, timeout_s: float) -> tuple[Any, Binding]:
        """The agent's result, and what was seen of its calls. Raises whatever the agent raises."""
        with bind(session.base_url, session.api_key, session_id=session.id) as binding:
            async with contextlib.AsyncExitStack() as stack:
                extras: dict[str, Any] = {
                    "session": session,
                    "base_url": session.base_url,
                    "api_key": session.api_key,
                }
                if "http_client" in self._user.extras:
                    # One each, so that an agent which closes its client closes nobody else's.
                    client = httpx.AsyncClient(timeout=timeout_s, trust_env=False)
                    extras["http_client"] = await stack.enter_async_context(client)
                return await self._user.call(dict(task), timeout=timeout_s, extras=extras), binding
