"""Attaching to an agent's HTTP clients without touching the agent.

Invariant: a request made inside a session to a model host goes to that session's gateway with that
session's key; every other request is untouched, byte for byte, and never sees the key.

`observe()` wraps `Client.send` and `AsyncClient.send` of whichever of httpx and httpx2 is installed, on
the class, so clients built earlier are covered as well. Which session a request belongs to is a context
variable: many sessions run at once in one process, as tasks or as threads with a copied context.
A model host is the gateway itself, any gateway of an earlier run in this process (a client kept from
then still points there), api.openai.com, api.anthropic.com, what OPENAI_BASE_URL or
ANTHROPIC_BASE_URL say, and what `observe(hosts=...)` adds; on hosts other than the gateway only the
paths of a model API are taken, so embeddings or files go where they always went.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import importlib
import importlib.util
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

log = logging.getLogger("areal_agent")

LIBRARIES = ("httpx", "httpx2")

PLACEHOLDER_KEY = "areal-session-key-comes-from-the-context"
"""Lets `AsyncOpenAI()` be built without arguments; it opens nothing and is replaced on every request."""

DEFAULT_BASES = ("https://api.openai.com/v1", "https://api.anthropic.com")
BASE_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_URL")

MODEL_PATH = re.compile(r"^/(chat/completions|completions|responses|messages|models|rewards)(/|$)")
"""Paths below /v1 that a model API has and the gateway serves."""

LABEL_PREFIX = "x-areal-label-"

LabelSource = Callable[[], Mapping[str, str] | None]


@dataclass(eq=False)
class Binding:
    """What a request needs to know of the session it is made in.

    Attributes:
        base_url: the session's gateway URL, ending in /v1.
        captured: requests sent to the gateway for this session by this process.
        strays: model-like requests made inside the session that went to hosts nobody named.
    """

    base_url: str
    api_key: str = field(repr=False)
    session_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    captured: int = 0
    strays: set[str] = field(default_factory=set)


_current: contextvars.ContextVar[Binding | None] = contextvars.ContextVar("areal_session", default=None)

# An instrumentation of other libraries' classes is process-wide by nature; this is all its state.
_lock = threading.Lock()
_patched: dict[type, tuple[Any, Any]] = {}
_hosts: set[str] = set()
_sources: list[LabelSource] = []
_bound: dict[str, Binding] = {}  # by key, for clients that were given a session's key by hand
_gateways: set[str] = set()  # every base URL a session ever had here: it outlives its run in clients
_used: weakref.WeakKeyDictionary[Any, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()


def observe(hosts: Iterable[str] = ()) -> bool:
    """Instrument the installed HTTP clients. Idempotent; returns whether anything new was wrapped.

    Args:
        hosts: further model hosts, as base URLs, e.g. "https://llm.example.com/v1".
    """
    with _lock:
        _hosts.update(hosts)
        new = False
        for name in LIBRARIES:
            if importlib.util.find_spec(name) is None:
                continue
            module = importlib.import_module(name)
            for cls, wrap in ((module.Client, _wrap_sync), (module.AsyncClient, _wrap_async)):
                if cls not in _patched:
                    original = cls.send
                    _patched[cls] = (original, wrap(original))
                    cls.send = _patched[cls][1]
                    new = True
        return new


def unobserve() -> None:
    """Undo `observe`. A wrapper that somebody else wrapped in turn stays, and passes everything on."""
    with _lock:
        for cls, (original, ours) in _patched.items():
            if cls.__dict__.get("send") is ours:
                cls.send = original  # type: ignore[attr-defined]
        _patched.clear()
        _hosts.clear()


async def release_connections() -> None:
    """Close the connections that clients used in sessions still hold, and leave the clients usable.

    A connection lives and dies with its event loop, and a run ends with one; a client that the user keeps
    would trip over what is left in its pool when the next run uses it in another loop.
    """
    loop = asyncio.get_running_loop()
    for client in [c for c, used_in in _used.items() if used_in is loop]:
        for transport in (client._transport, *client._mounts.values()):
            # Only the libraries' own, which are a pool and open a new connection on the next request.
            if type(transport).__name__ == "AsyncHTTPTransport":
                with contextlib.suppress(Exception):
                    await transport.aclose()
        _used.pop(client, None)


def add_label_source(source: LabelSource) -> Callable[[], None]:
    """Register a function whose mapping labels each call, such as the graph node that makes it.

    It runs in the caller's context just before the request is sent. Returns a function that removes it.
    """
    _sources.append(source)

    def remove() -> None:
        with contextlib.suppress(ValueError):
            _sources.remove(source)

    return remove


@contextlib.contextmanager
def bind(
    base_url: str, api_key: str, *, session_id: str = "", labels: Mapping[str, str] | None = None
) -> Iterator[Binding]:
    """Everything inside, tasks and copied contexts included, runs in the given session."""
    binding = Binding(base_url.rstrip("/"), api_key, session_id, dict(labels or {}))
    token = _current.set(binding)
    _bound[api_key] = binding
    _gateways.add(binding.base_url.removesuffix("/v1"))
    try:
        yield binding
    finally:
        _bound.pop(api_key, None)
        _current.reset(token)


def current() -> Binding | None:
    """The session that the caller runs in, if any."""
    return _current.get()


@contextlib.contextmanager
def client_environment(gateway_url: str) -> Iterator[None]:
    """Lets SDK clients be built with no arguments while a run lasts; restored afterwards.

    A provider whose key the user has set keeps its own address: inside a session `observe` re-targets it,
    outside (a judge in a reward function) it reaches the provider as before.
    """
    host = urlsplit(gateway_url).hostname or "127.0.0.1"
    new: dict[str, str] = {}
    for provider, base in (
        ("OPENAI", gateway_url.rstrip("/") + "/v1"),
        ("ANTHROPIC", gateway_url.rstrip("/")),
    ):
        if not os.environ.get(f"{provider}_API_KEY"):
            new[f"{provider}_API_KEY"] = PLACEHOLDER_KEY
            if not os.environ.get(f"{provider}_BASE_URL"):
                new[f"{provider}_BASE_URL"] = base
    for name in ("NO_PROXY", "no_proxy"):  # a proxy for the internet must not stand before the gateway
        present = os.environ.get(name, "")
        if host not in present.split(","):
            new[name] = f"{present},{host}".lstrip(",")
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) != new[name]:
                continue  # the user's code set it meanwhile
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _wrap_sync(original: Any) -> Any:
    @functools.wraps(original)
    def send(self: Any, request: Any, **kwargs: Any) -> Any:
        return original(self, request, **(kwargs | _retarget(self, request)))

    return send


def _wrap_async(original: Any) -> Any:
    @functools.wraps(original)
    async def send(self: Any, request: Any, **kwargs: Any) -> Any:
        if _current.get() is not None:
            _used[self] = asyncio.get_running_loop()
        return await original(self, request, **(kwargs | _retarget(self, request)))

    return send


def _retarget(client: Any, request: Any) -> dict[str, Any]:
    """Point `request` at its session, in place; returns keyword arguments that `send` then needs."""
    binding = _current.get()
    if binding is None or getattr(client, "areal_unobserved", False):
        return {}
    url = urlsplit(str(request.url))
    gateway = urlsplit(binding.base_url)
    ours = _origin(url) == _origin(gateway)
    if ours or any(_origin(url) == _origin(urlsplit(base)) for base in tuple(_gateways)):
        in_path = url.path.startswith("/s/")
        owner = _bound.get(url.path.split("/")[2] if in_path else _key_of(request))
        if owner is not None:  # somebody chose this session by hand: the key stays
            owner.captured += 1
            _label(request, owner)
        if owner is not None or in_path or url.path.startswith("/admin/"):
            return {}
    if ours:
        path = url.path
    else:
        path = _below_base(url)
        if path is None or not MODEL_PATH.match(path):
            if path is None and re.search(r"/(chat/completions|messages|responses|completions)$", url.path):
                binding.strays.add(f"{url.scheme}://{url.netloc}{url.path}")
            return {}
        path = gateway.path.rstrip("/") + path
    binding.captured += 1
    target = gateway._replace(path=path, query=url.query).geturl()
    request.url = type(request.url)(target)
    request.headers["host"] = gateway.netloc
    request.headers["authorization"] = f"Bearer {binding.api_key}"
    if "x-api-key" in request.headers:
        request.headers["x-api-key"] = binding.api_key
    for name in ("api-key", "cookie"):  # the provider's own secrets stay at home
        if name in request.headers:
            del request.headers[name]
    _label(request, binding)
    return {"auth": None}  # an auth of the client would overwrite the session's key


def _key_of(request: Any) -> str:
    bearer = request.headers.get("authorization", "")
    return bearer[7:] if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")


def _below_base(url: SplitResult) -> str | None:
    """The path below /v1 when `url` lies on a model host, else None."""
    bases = [
        *DEFAULT_BASES,
        *_hosts,
        *tuple(_gateways),
        *(os.environ.get(name, "") for name in BASE_VARIABLES),
    ]
    best: str | None = None
    for base in bases:
        parts = urlsplit(base)
        prefix = parts.path.rstrip("/")
        if not parts.netloc or _origin(parts) != _origin(url) or not url.path.startswith(prefix + "/"):
            continue
        below = url.path[len(prefix) :]
        if below.startswith("/v1/"):
            below = below[3:]
        if best is None or len(below) < len(best):
            best = below
    return best


def _origin(url: SplitResult) -> tuple[str, str, int | None]:
    port = url.port or {"https": 443, "http": 80}.get(url.scheme)
    host = url.hostname or ""
    return url.scheme, "127.0.0.1" if host == "localhost" else host, port


def _label(request: Any, binding: Binding) -> None:
    labels = dict(binding.labels)
    for source in tuple(_sources):
        labels.update(source() or {})
    for name, value in labels.items():
        header = LABEL_PREFIX + re.sub(r"[^a-z0-9_-]", "-", str(name).lower())
        request.headers[header] = quote(str(value), safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~")
