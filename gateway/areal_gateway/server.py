"""The gateway as a process: `serve(run_dir)` runs until SIGTERM or SIGINT.

Invariant: RUN_DIR/gateway.json exists only while the gateway answers at the URL in it, and whatever way
this process ends on purpose, its engines are ended before it.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
from pathlib import Path

import orjson
from aiohttp import web

from areal_agent.config import GatewayConfig, RunConfig
from areal_agent.errors import ConfigError
from areal_agent.rundir import RunDir
from areal_gateway.app import create_app
from areal_gateway.core import GatewayFleet
from areal_gateway.events import EventBus
from areal_gateway.ledger import Ledger
from areal_gateway.serving import GatewayRunner
from areal_gateway.tokens import Tokens

log = logging.getLogger(__name__)

YOUNG = 50_000
"""New objects, those gone again not counted, after which the garbage collector looks at them."""

SHUTDOWN_S = 3.0
"""How long open connections may take to end when the gateway stops."""


def serve(run_dir: str | Path) -> None:
    """Run the gateway of RUN_DIR (its config.json) in this process until it is told to stop.

    Raises ConfigError: a setting, the model folder, the ledger or the port cannot be used; EngineError: no
    engine came up.
    """
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # One text at a time is tokenised; handing it to a pool of threads costs more than most texts do.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = Path(run_dir)
    config = RunConfig.read(folder / "config.json")
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(folder, config))
    else:
        uvloop.run(_serve(folder, config))


run = serve


async def _serve(run_dir: Path, config: RunConfig) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    sock = bind(config.gateway)
    try:
        serving = asyncio.create_task(_run(run_dir, config, sock, stopped))
        stop = asyncio.create_task(stopped.wait())
        await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():  # still starting its engines, perhaps; cancelling ends those as well
            log.info("stopping")
            serving.cancel()
        stop.cancel()
        try:
            await serving
        except asyncio.CancelledError:
            if not stopped.is_set():
                raise
    finally:
        sock.close()


async def _run(run_dir: Path, config: RunConfig, sock: socket.socket, stopped: asyncio.Event) -> None:
    from areal_gateway.fleet import Fleet

    tokens = Tokens.load(config.model, config.gateway, config.fleet.max_model_len)
    key = RunDir(run_dir).admin_key()
    events = EventBus()

    def on_event(event: dict) -> None:
        log.info("fleet: %s", " ".join(f"{k}={v}" for k, v in event.items()))
        events.forward(event)

    ledger = Ledger(run_dir / "ledger.sqlite", config.gateway.ledger_sync)
    try:
        fleet = Fleet(config, run_dir, on_event)
        try:
            await fleet.start()
            await _answer(run_dir, config, sock, fleet, ledger, tokens, key, events)
        finally:
            await asyncio.shield(fleet.stop())
    finally:
        ledger.close()


async def _answer(
    run_dir: Path,
    config: RunConfig,
    sock: socket.socket,
    fleet: GatewayFleet,
    ledger: Ledger,
    tokens: Tokens,
    key: str,
    events: EventBus,
) -> None:
    """Serve until cancelled."""
    app = create_app(
        config=config,
        fleet=fleet,
        ledger=ledger,
        tokens=tokens,
        admin_key=key,
        events=events,
        project_key=RunDir(run_dir).project_key() if config.online.enabled else None,
    )
    runner = GatewayRunner(app, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    spare_the_loop()
    where = run_dir / "gateway.json"
    try:
        await web.SockSite(runner, sock, ssl_context=tls(config.gateway)).start()
        url = _url(sock, "https" if config.gateway.tls_cert else "http")
        _write(where, {"url": url, "pid": os.getpid()})
        log.info("gateway answers at %s, %s tokens of context, renderer %s", url, tokens.context, tokens.name)
        await asyncio.Event().wait()
    finally:
        where.unlink(missing_ok=True)
        await runner.cleanup()


def spare_the_loop() -> None:
    """Have the garbage collector stop the loop seldom.

    What start-up made lives as long as the process: looking through it takes a tenth of a second and more. A call
    leaves no circle of references behind (a test holds it to that), and to look through what two hundred calls
    have in hand, thousands of numbers each, takes 20 ms and more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 50)


def bind(config: GatewayConfig) -> socket.socket:
    """A bound socket. Raises ConfigError: the port is taken, or the address is not loopback and not allowed."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise ConfigError(f"gateway.host = {config.host!r} is no address of this machine: {e}") from e
    family, kind, protocol, _, address = found[0]
    loopback = ipaddress.ip_address(address[0]).is_loopback
    if not loopback and not config.allow_remote and not config.tls_cert:
        raise ConfigError(
            f"gateway.host = {config.host!r} can be reached from other machines, without TLS; use 127.0.0.1, set "
            "gateway.tls_cert and gateway.tls_key, or gateway.allow_remote when that is meant"
        )
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as e:
        sock.close()
        raise ConfigError(
            f"cannot bind {config.host} port {config.port}: {e.strerror}; stop what uses it, or set gateway.port to "
            "0 for a free one"
        ) from e
    return sock


def tls(config: GatewayConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises ConfigError when certificate and key cannot be used together."""
    if not config.tls_cert and not config.tls_key:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key or None)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(
            f"gateway.tls_cert = {config.tls_cert!r} and gateway.tls_key = {config.tls_key!r} cannot be used: {e}"
        ) from e
    return context


def _url(sock: socket.socket, scheme: str) -> str:
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if sock.family == socket.AF_INET else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _write(path: Path, value: dict) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(orjson.dumps(value))
    fresh.replace(path)
