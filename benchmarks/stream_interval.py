"""What streaming costs: tokens per second of one real engine by tokens per streamed event.

The gateway streams from the engine even where its client does not, so that a reply can go on when its engine
dies. `fleet.stream_interval` says how many tokens an event holds; an engine is started for each value.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from _face import Report, main
from _small_model import small_model

from areal_agent.config import RunConfig
from areal_gateway.fleet import EngineSampling, Fleet

INTERVALS = (1, 8, 32)
CALLS = 32
PROMPT_TOKENS = 64
REPLY_TOKENS = 256


def measure(quick: bool) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch))
        for interval in INTERVALS:
            report.rows.append(asyncio.run(speed(model, Path(scratch), interval, 2 if quick else 5)))
    alone = report.rows[0]["tokens/s"]
    for row in report.rows:
        row["over 1"] = row["tokens/s"] / alone
    default = RunConfig().fleet.stream_interval
    (ours,) = [row for row in report.rows if row["tokens per event"] == default]
    best = max(row["tokens/s"] for row in report.rows)
    share = ours["tokens/s"] / best
    report.target(f"the default of {default} keeps 0.85 of the best throughput: {share:.2f}", share >= 0.85)
    return report


async def speed(model: Path, scratch: Path, interval: int, rounds: int) -> dict[str, Any]:
    values = {
        "model": str(model),
        "fleet": {"engines": 1, "stream_interval": interval, "max_model_len": 1024, "kv_cache_gib": 0.5},
    }
    fleet = Fleet(RunConfig.parse(values), scratch, lambda _: None)
    await fleet.start()
    events = 0

    async def call(i: int) -> None:
        nonlocal events
        sampling = EngineSampling(max_tokens=REPLY_TOKENS, extra={"ignore_eos": True})
        prompt = [100 + (7 * i + k) % 800 for k in range(PROMPT_TOKENS)]
        stream = fleet.generate(session_id=str(i), prompt_ids=prompt, sampling=sampling)
        async with aclosing(stream):
            async for _ in stream:
                events += 1

    async def batch() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(call(i) for i in range(CALLS)))
        return CALLS * REPLY_TOKENS / (time.perf_counter() - began)

    try:
        await batch()
        events = 0
        rates = [await batch() for _ in range(rounds)]
    finally:
        await fleet.stop()
    return {
        "tokens per event": interval,
        "events per reply": events / CALLS / rounds,
        "tokens/s": statistics.median(rates),
    }


if __name__ == "__main__":
    main(__doc__ or "", measure)
