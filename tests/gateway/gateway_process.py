"""A whole gateway over a scripted fleet as a process of its own, for tests that kill it.

python gateway_process.py FOLDER PORT
"""

from __future__ import annotations

import asyncio
import os
import sys
import zlib
from pathlib import Path

from aiohttp import web
from gateway_support import ADMIN_KEY, Reply, ScriptedFleet

from areal_agent.config import GatewayConfig, RunConfig
from areal_gateway.app import create_app
from areal_gateway.ledger import Ledger
from areal_gateway.serving import GatewayRunner
from areal_gateway.tokens import Tokens


def script(prompt_ids: list[int]) -> Reply:
    """A few milliseconds, so that kills meet calls at every stage; longer for some."""
    n = zlib.crc32(str(prompt_ids).encode())
    return Reply(f"answer {n} " + "x " * (n % 20), chunk=4, delay_s=(n % 5) / 1000)


async def serve(folder: Path, port: int, tokens: Tokens) -> None:
    fleet = ScriptedFleet(tokens)
    fleet.rule = script
    app = create_app(
        config=RunConfig.parse({"model": "models/policy"}),
        fleet=fleet,
        ledger=Ledger(folder / "ledger.sqlite"),
        tokens=tokens,
        admin_key=ADMIN_KEY,
    )
    runner = GatewayRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("ready", os.getpid(), flush=True)
    await asyncio.Event().wait()


def main(folder: Path, port: int) -> None:
    tokens = Tokens.load(folder / "policy", GatewayConfig())
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            asyncio.run(serve(folder, port, tokens))
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
