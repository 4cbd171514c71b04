"""What interrupting pays: tokens per second and update latency with replies of very different lengths.

Two real engines, a closed loop of calls, and weight updates by broadcast at a fixed interval of 10 to 20 mean
replies. The same engines and the same lengths (log-normal, the longest 20 times the mean) under three ways:
`keep` freezes replies and lets them go on, `resubmit` aborts them and sends prompt and partial reply again,
`drain` admits nothing new and waits for the longest (Fu et al., AReaL, 2025, "interruptible generation", has
the first against the last). New weights lie in the engines before a drain begins, which favours it.

For each update: `prefilled again`, tokens that had to be computed a second time; `tokens lost`, how far it
fell behind the rate just before updates (the mean of all runs). From the latter follows keep over drain for
other intervals, which is computed, not measured.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from _face import Report, main
from transformers import AutoModelForCausalLM

from areal_agent.config import RunConfig
from areal_gateway.fleet import EngineSampling, Fleet

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "examples" / "agents")]

from fakes.sender import Sender, checksums, pack  # noqa: E402
from small_model.warm_start import RECIPE, blank  # noqa: E402

MODES = ("keep", "resubmit", "drain")
INTERVALS = (5, 10, 15, 20, 30)
"""Mean replies between two updates, for which keep over drain is computed."""

PROMPT_TOKENS = 64
SIGMA = 1.2
"""Of the lengths' logarithms."""

LONGEST = 20
"""Mean replies."""

RAMP_S = 10.0
"""Until the calls in flight are as mixed as they stay: at first all of them are young."""


@dataclass(frozen=True)
class Regime:
    """`calls` at once, of replies with a mean of `mean` tokens; an update every `replies` mean replies."""

    calls: int
    mean: int
    replies: int
    updates: int
    order: tuple[str, ...]
    """Modes as they run: there and back, for the machine's other work must not favour a place in the order."""

    def lengths(self) -> Iterator[int]:
        """Tokens of one reply after the other, the same in every mode."""
        rng = random.Random(0)
        middle = math.log(self.mean) - SIGMA**2 / 2
        while True:
            yield max(1, min(LONGEST * self.mean, round(rng.lognormvariate(middle, SIGMA))))


QUICK = Regime(calls=64, mean=50, replies=15, updates=1, order=("keep", "drain", "resubmit", "drain", "keep"))
WHOLE = Regime(calls=64, mean=80, replies=15, updates=2, order=("keep", "drain", "resubmit", "drain", "keep"))


@dataclass
class Loop:
    """A closed loop of calls."""

    fleet: Fleet
    regime: Regime
    tokens: int = 0
    done: int = 0

    async def run(self) -> None:
        lengths = self.regime.lengths()
        async with asyncio.TaskGroup() as group:
            for i in range(self.regime.calls):
                group.create_task(self._client(i, lengths))

    async def _client(self, i: int, lengths: Iterator[int]) -> None:
        rng = random.Random(i)
        for n in lengths:
            prompt = [rng.randrange(100, 900) for _ in range(PROMPT_TOKENS)]
            sampling = EngineSampling(max_tokens=n, extra={"ignore_eos": True})
            stream = self.fleet.generate(session_id=f"s{i}", prompt_ids=prompt, sampling=sampling)
            got = 0
            async with aclosing(stream):
                async for chunk in stream:
                    got += len(chunk.token_ids)
                    self.tokens += len(chunk.token_ids)
            if got != n:
                raise SystemExit(f"a reply of {n} tokens came with {got}")
            self.done += 1


def measure(quick: bool) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch))
        asyncio.run(compare(report, model, Path(scratch), QUICK if quick else WHOLE))
    return report


async def compare(report: Report, model: Path, scratch: Path, regime: Regime) -> None:
    values = {
        "model": str(model),
        "fleet": {"engines": 2, "max_num_seqs": 64, "max_model_len": 4096, "kv_cache_gib": 0.5},
        "gateway": {"hold_timeout_s": 120},
    }
    config = RunConfig.parse(values)
    weights = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    engines = Fleet(config, scratch, lambda _: None)
    await engines.start()
    interval: float | None = None
    per_mode: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    try:
        for mode in regime.order:
            figures = await run(mode, config, engines, scratch, weights, regime, interval)
            interval = interval or figures["interval"]
            print(
                mode, json.dumps(figures), file=sys.stderr, flush=True
            )  # a run cut short has said something
            per_mode[mode].append(figures)
    finally:
        await engines.stop()
    assert interval is not None
    steady = statistics.fmean(f["steady"] for runs in per_mode.values() for f in runs)
    speed = {mode: statistics.fmean(f["tokens/s"] for f in runs) for mode, runs in per_mode.items()}
    lost = {mode: (steady - speed[mode]) * interval for mode in MODES}
    for mode, runs in per_mode.items():
        row = {name: statistics.fmean(f[name] for f in runs) for name in runs[0]}
        del row["interval"], row["steady"]
        ratio = speed[mode] / speed["drain"]
        report.rows.append({"mode": mode, **row, "tokens lost": lost[mode], "over drain": ratio})
    lengths = list(islice(regime.lengths(), 4000))
    report.facts["calls in flight, on two engines"] = regime.calls
    report.facts["prompt, tokens"] = PROMPT_TOKENS
    report.facts["replies, tokens"] = (
        f"mean {statistics.fmean(lengths):.0f}, median {statistics.median(lengths):.0f}, longest {max(lengths)} "
        f"(log-normal, sigma {SIGMA:g}, cut at {LONGEST} x the mean)"
    )
    report.facts["update interval"] = f"{regime.replies} mean replies, {interval:.1f} s"
    report.facts["updates per mode"] = {mode: regime.updates * len(runs) for mode, runs in per_mode.items()}
    report.facts["keep over drain, runs in their order"] = ", ".join(
        f"{a['tokens/s'] / b['tokens/s']:.2f}"
        for a, b in zip(per_mode["keep"], per_mode["drain"], strict=True)
    )
    reply_s = interval / regime.replies
    report.facts["keep over drain, computed, by interval in mean replies"] = ", ".join(
        f"{n}: {(steady * n * reply_s - lost['keep']) / (steady * n * reply_s - lost['drain']):.2f}"
        for n in INTERVALS
    )
    report.facts["load average of the machine"] = f"{os.getloadavg()[0]:.1f}"
    ratio = speed["keep"] / speed["drain"]
    report.target(f"keep has at least 1.12 times the throughput of drain: {ratio:.2f}", ratio >= 1.12)


async def run(
    mode: str,
    config: RunConfig,
    engines: Fleet,
    scratch: Path,
    weights: dict[str, torch.nn.Parameter],
    regime: Regime,
    interval: float | None,
) -> dict[str, float]:
    """One mode on the engines of `engines`, through a fleet of its own that is attached to them."""
    config = config.model_copy(deep=True)
    config.fleet.attach = [m.url for m in engines.members]
    config.fleet.engines = 0
    config.fleet.driver = "resubmit" if mode == "resubmit" else "spans"
    fleet, sender = Fleet(config, scratch, lambda _: None), Sender(timeout_s=60)
    await fleet.start()
    loop = Loop(fleet, regime)
    calls = asyncio.create_task(loop.run())
    try:
        # The first update of a fleet makes the group, and the first of an engine compiles: neither is measured.
        await sleep_until(time.perf_counter() + RAMP_S / 2, calls)
        await update("keep", fleet, sender, weights)
        here, then = loop.tokens, time.perf_counter()
        await sleep_until(then + RAMP_S / 2, calls)
        if interval is None:  # a mean reply takes calls x mean length / rate (Little's law)
            rate = (loop.tokens - here) / (time.perf_counter() - then)
            interval = regime.replies * regime.calls * statistics.fmean(islice(regime.lengths(), 4000)) / rate
        latencies, pauses, steady = [], [], []
        fleet.calls.prefilled_again.clear()
        tokens, began = loop.tokens, time.perf_counter()
        for i in range(regime.updates):
            await sleep_until(began + (i + 0.25) * interval, calls)
            here, then = loop.tokens, time.perf_counter()
            await sleep_until(began + (i + 0.5) * interval, calls)
            steady.append((loop.tokens - here) / (time.perf_counter() - then))
            start = time.perf_counter()
            pauses.append(await update(mode, fleet, sender, weights))
            latencies.append(time.perf_counter() - start)
        await sleep_until(began + regime.updates * interval, calls)
        seconds = time.perf_counter() - began
        again = sum(fleet.calls.prefilled_again.values())
        return {
            "tokens/s": (loop.tokens - tokens) / seconds,
            "update latency s": statistics.fmean(latencies),
            "pause s": statistics.fmean(pauses),
            "prefilled again": again / regime.updates,
            "interval": interval,
            "steady": statistics.fmean(steady),
        }
    finally:
        calls.cancel()
        await asyncio.gather(calls, return_exceptions=True)
        sender.leave()
        await fleet.stop()


async def sleep_until(when: float, calls: asyncio.Task[None]) -> None:
    done, _ = await asyncio.wait([calls], timeout=max(0.0, when - time.perf_counter()))
    for task in done:
        task.result()


async def update(mode: str, fleet: Fleet, sender: Sender, weights: dict[str, torch.nn.Parameter]) -> float:
    """New weights for every engine; seconds between the first pause and the last resume."""
    version = fleet.version + 1
    with torch.no_grad():
        fresh = {name: w + 1e-3 * torch.randn_like(w) for name, w in weights.items()}
    manifest, buckets = pack(fresh, 64 << 20)
    begun = await sender.begin(fleet.weights, version, manifest)
    await sender.send(begun, buckets)
    with held(fleet, mode == "drain"):
        while mode == "drain" and any(m.calls for m in fleet.members):  # noqa: ASYNC110 (nobody tells)
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


def small_model(scratch: Path) -> Path:
    """The examples' shape with random weights, and room for the longest reply."""
    folder = blank(scratch / "model", RECIPE, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


if __name__ == "__main__":
    main(__doc__ or "", measure)
