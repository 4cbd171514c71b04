"""Calling what the user wrote: agents and reward functions, sync or async, with what they ask for by name.

Invariant: a time-out counts from the moment the user's code starts, never the wait before it, and
nothing the user wrote can hang the caller: an async function is cancelled, a sync one runs in a daemon
thread (with a copy of the caller's context) and is abandoned, counted and bounded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from areal_agent.errors import ArealError, ConfigError

CANCEL_S = 1.0
"""How long a cancelled coroutine may take to leave; one that swallows cancellation is abandoned."""

MAX_ABANDONED = 64
"""Threads that may run on past their time-out; beyond it each new call would only add load."""


class TimedOut(TimeoutError):
    """The user's code ran past its time-out (and not: it raised a TimeoutError of its own)."""


class TooManyAbandoned(ArealError):
    """Too many threads of the user's code run on past their time-outs."""


class Userland:
    """A callable of the user, adapted once.

    Attributes:
        extras: the names among `offers` that the callable takes.
    """

    def __init__(
        self, fn: Callable[..., Any], role: str, positional: tuple[str, ...], offers: tuple[str, ...]
    ):
        """Args:
        role: what it is to the user, "agent" or "reward"; starts the error's sentence.
        positional: what is passed by position, in words, e.g. ("task", "result").
        offers: what it may also take by name.

        Raises:
            ConfigError: not callable, takes too few arguments, or needs one that nobody provides.
        """
        if not callable(fn):
            raise ConfigError(
                f"the {role} is a {type(fn).__name__} ({fn!r}); it must be a function {role}({', '.join(positional)})"
            )
        self.fn = fn
        self.role = role
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004 - the method itself is inspected, not its presence
        )
        self.extras = _match(fn, role, positional, offers)

    async def call(self, *args: Any, timeout: float, extras: Mapping[str, Any]) -> Any:
        """Run it. Raises TimedOut `timeout` seconds after its start, or whatever it raises."""
        named = {name: extras[name] for name in self.extras if name in extras}
        if self.is_async:
            return await _bounded(self.fn(*args, **named), timeout)
        value = await _in_thread(lambda: self.fn(*args, **named), timeout)
        # A lambda or a partial around an async function hands back its coroutine.
        return await _bounded(value, timeout) if inspect.isawaitable(value) else value


def _match(fn: Callable[..., Any], role: str, positional: tuple[str, ...], offers: tuple[str, ...]) -> tuple:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return ()  # a builtin without a signature: positional arguments only
    wants = f"{role}({', '.join(positional)})"
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(by_position) < len(positional) and not variadic:
        raise ConfigError(f"the {role} takes {len(by_position)} arguments; it must be a function {wants}")
    rest = by_position[len(positional) :] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    unknown = [p.name for p in rest if p.default is p.empty and p.name not in offers]
    if unknown:
        raise ConfigError(
            f"the {role} needs {', '.join(unknown)}, which nobody provides; it must be a function {wants}, "
            f"and may also take {', '.join(offers)} by name"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offers
    return tuple(p.name for p in rest if p.name in offers)


async def _bounded(awaitable: Any, timeout: float) -> Any:
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_retrieve)
    await asyncio.wait({task}, timeout=CANCEL_S)
    raise TimedOut(f"it ran for more than {timeout:g} s")


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # marks it as seen: the caller was told of the time-out instead


_abandoned = threading.Semaphore(MAX_ABANDONED)


async def _in_thread(fn: Callable[[], Any], timeout: float) -> Any:
    """Run `fn` in a daemon thread of its own: a pool's threads would be joined at exit, for ever."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    lock = threading.Lock()
    given_up = False

    def body() -> None:
        loop.call_soon_threadsafe(started.set)
        try:
            outcome, failure = context.run(fn), None
        except BaseException as e:  # the caller re-raises it
            outcome, failure = None, e
        with lock:
            if given_up:
                _abandoned.release()
                return
            if failure is None:
                done.set_result(outcome)
            else:
                done.set_exception(failure)

    threading.Thread(target=body, name="areal-user-code", daemon=True).start()
    await started.wait()
    future = asyncio.wrap_future(done)

    def give_up() -> bool:
        """Leave the thread to itself; False when it runs on and there is no place for it any more."""
        nonlocal given_up
        with lock:
            running = not done.done()
            given_up = running and _abandoned.acquire(blocking=False)
        return given_up or not running

    try:
        await asyncio.wait({future}, timeout=timeout)
    except asyncio.CancelledError:
        give_up()  # a run that is being stopped starts no more calls: no bound to enforce
        raise
    if future.done():
        return future.result()
    if not give_up():
        raise TooManyAbandoned(
            f"{MAX_ABANDONED} calls of the user's code passed their time-out of {timeout:g} s and still "
            "run; give it a time-out of its own, or raise rollout.reward_timeout_s / session_timeout_s"
        )
    raise TimedOut(f"it ran for more than {timeout:g} s")
