"""The processes of a run: the gateway (with its engines below it) and the trainer, watched.

Invariant: while `watch` runs, the death of either ends the wait with an error that shows what its log
says last; after `stop`, and after any death of this process, none of them is left.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from areal_agent.config import RunConfig
from areal_agent.errors import ArealError, EngineError, GatewayError, TrainerError
from areal_agent.launch.process import Guarded
from areal_agent.rundir import RunDir
from areal_agent.session import GatewayClient

T = TypeVar("T")

GATEWAY_GRACE_S = 20.0
"""The gateway ends its engines in order: their grace of 5 s and the kill must fit in."""

TRAINER_GRACE_S = 10.0
"""torchrun passes SIGTERM on to its ranks and waits for them."""

SETUP_S = 60.0
"""What the gateway needs besides its engines: importing its libraries, loading the tokenizer."""

TROUBLE = re.compile(r"error|exception|traceback|refus|cannot|fail|killed|no such", re.IGNORECASE)


class Services:
    """Starts, watches and stops the processes of one run."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self.run = run
        self.config = config
        self._processes: dict[str, Guarded] = {}

    async def start_gateway(self) -> GatewayClient:
        """Returns once it answers, which is when its engines are up.

        Raises GatewayError when it ends instead (a port taken, no engine came up), or takes too long.
        """
        (self.run.path / "gateway.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "areal_agent.cli", "gateway", "--run-dir", str(self.run.path)]
        process = await Guarded.astart(command, log_path=self.run.log("gateway"), grace=GATEWAY_GRACE_S)
        self._processes["gateway"] = process
        limit = SETUP_S + self._engine_start_s()
        end = time.monotonic() + limit
        while (info := self.run.read("gateway.json")) is None:
            if not process.running:
                raise self._death("gateway")
            if time.monotonic() > end:
                raise GatewayError(
                    f"the gateway was not ready within {limit:g} s{self._last_words('gateway')}"
                )
            await asyncio.sleep(0.05)
        client = GatewayClient(info["url"], self.run.admin_key())
        while not await client.healthy():
            if not process.running:
                raise self._death("gateway")
            if time.monotonic() > end:
                raise GatewayError(
                    f"the gateway at {info['url']} does not answer{self._last_words('gateway')}"
                )
            await asyncio.sleep(0.1)
        return client

    async def engines_ready(self, client: GatewayClient) -> dict[str, Any]:
        """Wait until every engine serves (or at least one does and the rest are out); returns the status.

        Raises EngineError when none does in `fleet.start_timeout_s` (and a restart), with the fleet's reason.
        """
        limit = self._engine_start_s()
        end = time.monotonic() + limit
        while True:
            status = await client.status()
            engines = (status.get("fleet") or {}).get("engines") or []
            states = [str(e.get("state")) for e in engines]
            late = time.monotonic() > end
            if "serving" in states and (late or "starting" not in states):
                return status
            if late:
                reason = (
                    status.get("last_error") or f"their states: {', '.join(states) or 'none was started'}"
                )
                raise EngineError(
                    f"no engine was ready within {limit:g} s: {reason}; see {self.run.log('engine-0')}"
                )
            await asyncio.sleep(0.25)

    async def start_trainer(self, client: GatewayClient, *, resume: bool = False) -> None:
        """Start the FSDP2 ranks under torchrun; returns once torchrun runs.

        resume: go on from the run's newest training state.
        """
        self.run.stop_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.config.trainer.ranks)]
        command += ["-m", "areal_trainers.main", "--run-dir", str(self.run.path)]
        command += ["--resume"] if resume else []
        env = dict(os.environ) | {"AREAL_GATEWAY_URL": client.url, "AREAL_ADMIN_KEY": self.run.admin_key()}
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.config.trainer.ranks)))
        self._processes["trainer"] = await Guarded.astart(
            command, env=env, log_path=self.run.log("trainer"), grace=TRAINER_GRACE_S
        )

    async def trainer_finished(self) -> dict[str, Any]:
        """Wait for the trainer; returns what it wrote to trainer.json.

        Raises TrainerError when it ended with a code other than 0.
        """
        if await self._processes["trainer"].await_exit() != 0:
            raise self._death("trainer")
        return self.run.read("trainer.json") or {}

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; the gateway's death cancels it and says why.

        A failure of `work` that the gateway's death caused is reported as that death.
        """
        main = asyncio.ensure_future(work)
        gateway = self._processes.get("gateway")
        exit_ = asyncio.ensure_future(gateway.await_exit() if gateway else asyncio.sleep(float("inf")))
        try:
            await asyncio.wait({main, exit_}, return_when=asyncio.FIRST_COMPLETED)
            if main.done() and not main.cancelled():
                failure = main.exception()
                if isinstance(failure, (GatewayError, EngineError)) and gateway is not None:
                    await asyncio.wait({exit_}, timeout=1.0)  # a dying process is noticed a moment later
                if failure is None or not exit_.done():
                    return main.result()
            raise self._death("gateway")
        finally:
            for task in (main, exit_):
                task.cancel()
            await asyncio.wait({main, exit_})
            if main.done() and not main.cancelled():
                main.exception()

    async def stop(self) -> None:
        """End the trainer, then the gateway with its engines. Idempotent."""
        for name in ("trainer", "gateway"):
            if name in self._processes:
                await self._processes[name].aterminate()

    def _engine_start_s(self) -> float:
        """Seconds an engine may take to start, one restart included."""
        return self.config.fleet.start_timeout_s * (1 + min(1, self.config.fleet.max_restarts))

    def _death(self, name: str) -> ArealError:
        code = self._processes[name].poll()
        kinds = {"gateway": GatewayError, "trainer": TrainerError}
        return kinds[name](f"the {name} ended with code {code}{self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        """The log's path and its last relevant lines, to be put behind a sentence."""
        return last_words(self._processes[name].tail(400)) + f"\nThe whole log: {self.run.log(name)}"


def last_words(lines: list[str], most: int = 12) -> str:
    """The lines of a log that say what went wrong: the last traceback's end, or simply the last ones."""
    trouble = [i for i, line in enumerate(lines) if TROUBLE.search(line)]
    end = min(len(lines), trouble[-1] + 3) if trouble else len(lines)
    chosen = lines[max(0, end - most) : end]
    return ":\n" + "\n".join(f"    {line[:300]}" for line in chosen) if chosen else " and its log is empty"
