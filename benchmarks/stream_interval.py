"""What streaming costs: tokens per second of a real engine by tokens per streamed event.

The gateway streams from the engine even where its client does not, so that a reply can go on when its engine
dies. `fleet.stream_interval` says how many tokens an event holds. An engine is started for each value; they take
turns in a random order, one working at a time, and are compared round by round, for machines drift.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

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
        rates, events = asyncio.run(compare(model, Path(scratch), 5 if quick else 15))
    for interval in INTERVALS:
        report.rows.append(
            {
                "tokens per event": interval,
                "events per reply": events[interval],
                "tokens/s": statistics.median(rates[interval]),
                "over 1": over(rates[interval], rates[1]),
            }
        )
    default = RunConfig().fleet.stream_interval
    share = min(over(rates[default], rates[other]) for other in INTERVALS)
    report.facts["calls at once, reply"] = (
        f"{CALLS}, {REPLY_TOKENS} tokens each; {len(rates[default])} rounds"
    )
    report.facts["load average of the machine"] = f"{os.getloadavg()[0]:.1f}"
    report.target(f"the default of {default} keeps 0.85 of the best throughput: {share:.2f}", share >= 0.85)
    return report


def over(a: list[float], b: list[float]) -> float:
    """Median of the ratios, round by round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


async def compare(model: Path, scratch: Path, rounds: int) -> tuple[dict[int, list[float]], dict[int, float]]:
    """({interval: tokens/s of each round}, {interval: events per reply})."""
    rates: dict[int, list[float]] = {interval: [] for interval in INTERVALS}
    events = dict.fromkeys(INTERVALS, 0)
    async with AsyncExitStack() as stack:
        fleets = {}
        for interval in INTERVALS:
            fleets[interval] = fleet = await started(model, scratch / str(interval), interval)
            stack.push_async_callback(fleet.stop)
            await batch(fleet)  # the first one compiles
        for number in range(rounds):
            for interval in random.Random(number).sample(INTERVALS, len(INTERVALS)):
                began = time.perf_counter()
                events[interval] += await batch(fleets[interval])
                rates[interval].append(CALLS * REPLY_TOKENS / (time.perf_counter() - began))
    return rates, {interval: n / CALLS / rounds for interval, n in events.items()}


async def started(model: Path, scratch: Path, interval: int) -> Fleet:
    values = {
        "model": str(model),
        "fleet": {"engines": 1, "stream_interval": interval, "max_model_len": 1024, "kv_cache_gib": 0.5},
    }
    fleet = Fleet(RunConfig.parse(values), scratch, lambda _: None)
    await fleet.start()
    return fleet


async def batch(fleet: Fleet) -> int:
    """Events that came for CALLS replies at once."""
    events = 0

    async def call(i: int) -> None:
        nonlocal events
        sampling = EngineSampling(max_tokens=REPLY_TOKENS, extra={"ignore_eos": True})
        prompt = [100 + (7 * i + k) % 800 for k in range(PROMPT_TOKENS)]
        stream = fleet.generate(session_id=str(i), prompt_ids=prompt, sampling=sampling)
        async with aclosing(stream):
            async for _ in stream:
                events += 1

    await asyncio.gather(*(call(i) for i in range(CALLS)))
    return events


if __name__ == "__main__":
    main(__doc__ or "", measure)
