"""What interrupting pays: tokens per second and update latency with replies of very different lengths.

Two real engines, a closed loop of calls, and weight updates by broadcast every 15 mean replies. The same
replies (lengths log-normal, the longest 20 times the mean) under three ways: `keep` freezes them and lets them
go on, `resubmit` aborts them and sends prompt and partial reply again, `drain` admits nothing new and waits for
the longest (Fu et al., AReaL, 2025, "interruptible generation", has the first against the last, in a regime
where decoding is bound by memory). New weights lie in the engines before a drain begins, which favours it.

What draining costs depends on the regime: slots that stand empty are lost where a step takes as long for one
reply as for a full batch (an accelerator reading weights), and are not where its time grows with the batch.
So the step times of these engines are measured first. The default is 8 calls an engine, which a step of these takes
less than twice as long for as for one: the nearest that a CPU comes to that regime. The whole run also measures 32 an
engine, three times as long. From the lengths and the step times follows what keep over drain should be, were there
nothing but decoding; it is computed for the very replies that are measured, and printed beside.

A window begins when an update is there and ends when the next one may be. Modes take turns in a random order
with the same replies in the same slots, and their windows are compared pair by pair.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from _face import Report, main
from _replies import LONGEST, SIGMA, Computed, Measured, StepTime, constant, lengths, visit
from _small_model import LONGEST_CONTEXT, small_model
from transformers import AutoModelForCausalLM

from areal_agent.config import RunConfig
from areal_gateway.fleet import EngineSampling, Fleet

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from fakes.sender import Sender, checksums, pack

MODES = ("keep", "resubmit", "drain")
ENGINES = 2
PROMPT_TOKENS = 64
MEAN = 64
"""Tokens of a reply."""

INTERVAL = 15
"""Mean replies from one update to the next."""

OTHER_INTERVALS = (10, 20)
"""For which keep over drain is computed as well."""

SETTLE = 6
"""Mean replies before the first update: at first all calls are young, as they are after a drain."""

TYPICAL = list(islice(lengths(MEAN, "typical"), 10000))

STEP_TOKENS = 200
"""Of the replies by which step times are measured."""


@dataclass(frozen=True)
class Regime:
    """`calls` at once on all engines; each mode is visited `visits` times, for `windows` updates."""

    calls: int
    visits: int
    windows: int

    def replies(self, seed: object) -> list[Iterator[int]]:
        """For each call in flight, the lengths of the replies that follow one another in its place."""
        return [lengths(MEAN, f"{seed}/{i}") for i in range(self.calls)]


@dataclass
class Window:
    """What was measured from one update to the next.

    `again`: tokens prefilled a second time. `took`: seconds of each reply that ended.
    """

    tokens: int
    seconds: float
    latency_s: float
    pause_s: float
    again: int
    took: list[float]


@dataclass
class Loop:
    """A closed loop of calls: `tokens` that came, and how long the replies that ended had taken."""

    fleet: Fleet
    seed: object
    replies: list[Iterator[int]]
    tokens: int = 0
    took: list[float] = field(default_factory=list)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for i, own in enumerate(self.replies):
                group.create_task(self._client(i, own))

    async def _client(self, i: int, own: Iterator[int]) -> None:
        rng = random.Random(f"{self.seed}/{i}")
        for n in own:
            began = time.perf_counter()
            await self.call(f"s{i}", [rng.randrange(100, 900) for _ in range(PROMPT_TOKENS)], n)
            self.took.append(time.perf_counter() - began)

    async def call(self, session: str, prompt: list[int], n: int) -> None:
        sampling = EngineSampling(max_tokens=n, extra={"ignore_eos": True})
        got = 0
        stream = self.fleet.generate(session_id=session, prompt_ids=prompt, sampling=sampling)
        async with aclosing(stream):
            async for chunk in stream:
                got += len(chunk.token_ids)
                self.tokens += len(chunk.token_ids)
        if got != n:
            raise SystemExit(f"a reply of {n} tokens came with {got}")


def measure(quick: bool, calls: int | None = None) -> Report:
    if calls is not None and calls % ENGINES:
        raise SystemExit(
            f"--calls {calls}: {ENGINES} engines share them evenly; give a multiple of {ENGINES}"
        )
    report = Report()
    regimes = [
        Regime(calls or 16, visits=2, windows=2) if quick else Regime(calls or 16, visits=3, windows=3)
    ]
    if calls is None and not quick:
        regimes.append(Regime(64, visits=1, windows=2))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch))
        asyncio.run(compare(report, model, Path(scratch), regimes))
    return report


async def compare(report: Report, model: Path, scratch: Path, regimes: list[Regime]) -> None:
    most = max(r.calls for r in regimes) // ENGINES
    values = {
        "model": str(model),
        "fleet": {
            "engines": ENGINES,
            "max_num_seqs": max(64, most),
            "max_model_len": LONGEST_CONTEXT,
            "kv_cache_gib": 0.5,
        },
        "gateway": {"hold_timeout_s": 120},
    }
    config = RunConfig.parse(values)
    bench = Bench(config, scratch, dict(AutoModelForCausalLM.from_pretrained(model).named_parameters()))
    report.facts["replies, tokens"] = (
        f"mean {statistics.fmean(TYPICAL):.0f}, median {statistics.median(TYPICAL):.0f}, longest {max(TYPICAL)} "
        f"(log-normal, sigma {SIGMA:g}, cut at {LONGEST} x the mean), prompt {PROMPT_TOKENS}"
    )
    engines = Fleet(config, scratch, lambda _: None)
    await engines.start()
    try:
        bench.urls = [m.url for m in engines.members]
        steps = await bench.step_times(most)
        shown = ", ".join(f"{n}: {1e3 * s:.1f}" for n, s in steps.points)
        report.facts["step time, ms, by calls on each engine"] = shown
        for regime in regimes:
            await bench.compare(report, regime, steps, judged=regime is regimes[0])
    finally:
        await engines.stop()
    report.facts["load average of the machine"] = f"{os.getloadavg()[0]:.1f}"


@dataclass
class Bench:
    """Two engines at `urls`, and fleets that are attached to them one after the other."""

    config: RunConfig
    scratch: Path
    weights: dict[str, torch.nn.Parameter]
    urls: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def fleet(self, driver: str) -> AsyncIterator[tuple[Fleet, Callable[[bool], Awaitable[float]]]]:
        """(fleet, update): a fleet of its own, and how to give it new weights."""
        config = self.config.model_copy(deep=True)
        config.fleet = config.fleet.model_copy(update={"attach": self.urls, "engines": 0, "driver": driver})
        fleet, sender = Fleet(config, self.scratch, lambda _: None), Sender(timeout_s=60)
        await fleet.start()

        async def update(drain: bool) -> float:
            return await push(fleet, sender, self.weights, drain)

        try:
            await update(False)  # the first one makes the group, and clears what other fleets left in caches
            yield fleet, update
        finally:
            sender.leave()
            await fleet.stop()

    async def step_times(self, most: int) -> Measured:
        """With as many calls on every engine at once, for they share the machine."""
        sizes = [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
        async with self.fleet("spans") as (fleet, _):
            return Measured([(n, await self._step_time(fleet, n * ENGINES)) for n in sizes])

    async def _step_time(self, fleet: Fleet, calls: int) -> float:
        loop = Loop(fleet, f"step/{calls}", [iter([STEP_TOKENS] * 2) for _ in range(calls)])
        began = time.perf_counter()
        await loop.run()
        return (time.perf_counter() - began) * calls / loop.tokens

    async def compare(self, report: Report, regime: Regime, steps: Measured, *, judged: bool) -> None:
        """Add the rows and facts of one regime, and the target where this is the regime that is `judged`."""
        reply_s = await self.reply_s(regime, steps)
        runs: dict[str, list[list[Window]]] = {mode: [] for mode in MODES}
        for number in range(regime.visits):
            for mode in random.Random(number).sample(MODES, len(MODES)):
                windows = await self.visit(mode, regime, number, reply_s)
                runs[mode].append(windows)
                told = {
                    "calls": regime.calls,
                    "mode": mode,
                    "tokens/s": [round(w.tokens / w.seconds) for w in windows],
                }
                told |= {"latency s": [round(w.latency_s, 2) for w in windows]}
                told |= {"pause s": [round(w.pause_s, 2) for w in windows]}
                print(json.dumps(told), file=sys.stderr, flush=True)  # a run cut short has said something
        flat = {mode: [w for windows in visits for w in windows] for mode, visits in runs.items()}
        for mode, windows in flat.items():
            ratios = over(windows, flat["drain"])
            low, high = bootstrap(windows, flat["drain"])
            report.rows.append(
                {
                    "calls": regime.calls,
                    "mode": mode,
                    "tokens/s": rate(windows),
                    "update latency s": statistics.median(w.latency_s for w in windows),
                    "pause s": statistics.median(w.pause_s for w in windows),
                    "prefilled again": statistics.fmean(w.again for w in windows),
                    "over drain": rate(windows) / rate(flat["drain"]),
                    "95 %": f"{low:.2f} to {high:.2f}",
                    "median pair": statistics.median(ratios),
                }
            )
        self._tell(report, regime, steps, reply_s, flat)
        if judged:
            total = rate(flat["keep"]) / rate(flat["drain"])
            pair = statistics.median(over(flat["keep"], flat["drain"]))
            report.target(
                f"keep has at least 1.12 times the throughput of drain: {total:.2f}, median pair {pair:.2f}",
                min(total, pair) >= 1.12,
            )

    def _tell(
        self,
        report: Report,
        regime: Regime,
        steps: Measured,
        reply_s: float,
        flat: dict[str, list[Window]],
    ) -> None:
        with_calls = f"with {regime.calls} calls: "
        each = regime.calls // ENGINES
        report.facts[with_calls + "step time, ms"] = (
            f"{1e3 * steps(1):.1f} at 1 call on each engine, {1e3 * steps(each):.1f} at full batch ({each}): "
            f"{steps(each) / steps(1):.2f} times"
        )
        interval_s = INTERVAL * reply_s
        took = statistics.fmean(s for w in flat["keep"] for s in w.took)
        report.facts[with_calls + "update interval"] = (
            f"{interval_s:.1f} s, {interval_s / took:.1f} mean replies as `keep` took them; "
            f"{len(flat['keep'])} windows a mode"
        )
        pairs = ", ".join(f"{ratio:.2f}" for ratio in over(flat["keep"], flat["drain"]))
        report.facts[with_calls + "keep over drain, pair by pair"] = pairs
        replies, idle, ratio = expected(regime, constant, INTERVAL)
        report.facts[with_calls + "computed from the lengths"] = (
            f"a drain takes {replies:.1f} mean replies, {idle:.2f} of its slot-time is idle; with a constant step time "
            f"keep over drain would be {ratio:.2f}"
        )
        report.facts[with_calls + "computed with the measured step times, by interval"] = ", ".join(
            f"{n}: {expected(regime, steps, n)[2]:.2f}" for n in sorted((INTERVAL, *OTHER_INTERVALS))
        )

    async def reply_s(self, regime: Regime, steps: Measured) -> float:
        """Seconds of a mean reply at full batch: calls x mean length / rate (Little's law)."""
        guess = MEAN * steps(regime.calls // ENGINES)
        async with self.fleet("spans") as (fleet, _), calling(fleet, regime, "rate") as (loop, calls):
            await sleep(2 * guess, calls)
            here, then = loop.tokens, time.perf_counter()
            await sleep(10 * guess, calls)
            per_s = (loop.tokens - here) / (time.perf_counter() - then)
        return regime.calls * statistics.fmean(TYPICAL) / per_s

    async def visit(self, mode: str, regime: Regime, seed: int, reply_s: float) -> list[Window]:
        windows = []
        driver = "resubmit" if mode == "resubmit" else "spans"
        async with self.fleet(driver) as (fleet, update), calling(fleet, regime, seed) as (loop, calls):
            await sleep(SETTLE * reply_s, calls)
            for _ in range(regime.windows):
                again, tokens = sum(fleet.calls.prefilled_again.values()), loop.tokens
                ended = len(loop.took)
                began = time.perf_counter()
                pause_s = await update(mode == "drain")
                latency_s = time.perf_counter() - began
                await sleep(INTERVAL * reply_s - latency_s, calls)
                seconds = time.perf_counter() - began
                again = sum(fleet.calls.prefilled_again.values()) - again
                got = loop.tokens - tokens
                windows.append(Window(got, seconds, latency_s, pause_s, again, loop.took[ended:]))
        return windows


def expected(regime: Regime, step: StepTime, interval: int) -> tuple[float, float, float]:
    """(mean replies that a drain takes, share of its slot-time that is idle, keep over drain), for the very windows
    that are measured, were there nothing but decoding."""
    reply_s = statistics.fmean(TYPICAL) * step(regime.calls // ENGINES)

    def windows(drain: bool) -> list[Computed]:
        visits = (
            visit(
                regime.replies(seed),
                ENGINES,
                step,
                settle_s=SETTLE * reply_s,
                interval_s=interval * reply_s,
                windows=regime.windows,
                drain=drain,
            )
            for seed in range(regime.visits)
        )
        return [window for windows in visits for window in windows]

    keep, drain = windows(False), windows(True)
    slot_s = regime.calls * sum(w.drained_s for w in drain)
    replies = statistics.fmean(w.drained_s for w in drain) / reply_s
    return replies, sum(w.idle_s for w in drain) / slot_s, rate(keep) / rate(drain)


def rate(windows: Sequence[Window | Computed]) -> float:
    """Tokens per second, all by all."""
    return sum(w.tokens for w in windows) / sum(w.seconds for w in windows)


def over(a: list[Window], b: list[Window]) -> list[float]:
    return [x.tokens / x.seconds / (y.tokens / y.seconds) for x, y in zip(a, b, strict=True)]


def bootstrap(a: list[Window], b: list[Window]) -> tuple[float, float]:
    """95 % interval (percentiles) of the ratio of their rates; pairs of windows are drawn, with replacement."""
    rng = random.Random(0)
    pairs = list(zip(a, b, strict=True))
    drawn = ([*zip(*rng.choices(pairs, k=len(pairs)), strict=True)] for _ in range(4000))
    ratios = sorted(rate(x) / rate(y) for x, y in drawn)
    return ratios[100], ratios[-101]


@asynccontextmanager
async def calling(
    fleet: Fleet, regime: Regime, seed: object
) -> AsyncIterator[tuple[Loop, asyncio.Task[None]]]:
    """(loop, its task), ended with the block."""
    loop = Loop(fleet, seed, regime.replies(seed))
    calls = asyncio.create_task(loop.run())
    try:
        yield loop, calls
    finally:
        calls.cancel()
        await asyncio.gather(calls, return_exceptions=True)


async def sleep(seconds: float, calls: asyncio.Task[None]) -> None:
    """Raises what ended the calls, if something did."""
    done, _ = await asyncio.wait([calls], timeout=max(0.0, seconds))
    for task in done:
        task.result()


async def push(fleet: Fleet, sender: Sender, weights: dict[str, torch.nn.Parameter], drain: bool) -> float:
    """New weights for every engine; seconds between the first pause and the last resume."""
    version = fleet.version + 1
    with torch.no_grad():
        fresh = {name: w + 1e-3 * torch.randn_like(w) for name, w in weights.items()}
    manifest, buckets = pack(fresh, 4 << 20)
    begun = await sender.begin(fleet.weights, version, manifest)
    await sender.send(begun, buckets)
    with held(fleet, drain):
        while drain and any(m.calls for m in fleet.members):  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)
        return (await fleet.weights.commit(begun["update_id"], checksums(buckets)))["pause_s"]


@contextmanager
def held(fleet: Fleet, really: bool) -> Iterator[None]:
    if really:
        fleet.hold()
    try:
        yield
    finally:
        fleet.release()


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        own={"calls": {"type": int, "help": "measure this many calls at once, and no other number"}},
    )
