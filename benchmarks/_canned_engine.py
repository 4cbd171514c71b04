"""An engine that answers every request with the same tokens at once: what is left is what stands before it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes.engine import FakeEngine
from fakes.policy import Reply


async def serve(port: int, tokens: int) -> None:
    engine = FakeEngine(max_model_len=65536)
    ids = [10 + i % 200 for i in range(tokens)]
    engine.script.append(Reply(ids, finish_reason="length", logprobs=[-0.5] * tokens, times=None))
    await engine.start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.tokens))
