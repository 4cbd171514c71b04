"""`python -m areal_trainers.main --run-dir DIR [--resume]`, one process per rank, started by torchrun.

Reads RUN_DIR/config.json and the environment (AREAL_GATEWAY_URL, AREAL_ADMIN_KEY). Ends with code 0, or
with one sentence on stderr and code 1; on SIGTERM it gives its lease back and ends with code 143.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from areal_agent.config import RunConfig
from areal_agent.errors import ArealError, ConfigError, TrainerError, WeightUpdateError
from areal_agent.rundir import RunDir, newest_state
from areal_trainers.algorithm.models import load_companions
from areal_trainers.checkpoint import Checkpoints
from areal_trainers.client import TrainerClient
from areal_trainers.clock import Clock
from areal_trainers.learner import Learner
from areal_trainers.lora import attach
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.platform import Platform, check_offload, get_platform
from areal_trainers.probe import Probe
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.records import Records
from areal_trainers.source import BatchSource
from areal_trainers.state import TrainingState
from areal_trainers.trainer import train
from areal_trainers.weights_sender import WeightsSender, wire_dtype

RAISED_TOGETHER = (TrainerError, WeightUpdateError)
"""Errors that every rank raises at the same place, so that the ranks can still gather a checkpoint."""


class Terminated(BaseException):
    """SIGTERM or SIGINT came. No Exception, so that nothing on the way takes it for a failure to handle."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m areal_trainers.main", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--run-dir", required=True, type=Path, help="folder that holds config.json")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest training state in RUN_DIR/state"
    )
    given = parser.parse_args(argv)
    run = RunDir(given.run_dir)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminate)
    transformers_logging.disable_progress_bar()
    try:
        config = run.read_config()
        platform = get_platform(config.trainer.platform)
        with join_ranks(platform, config.trainer.sequence_parallel) as ranks:
            run_training(config, run, platform, ranks, gateway_address(run, os.environ), given.resume)
    except ArealError as e:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"areal_trainers: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        return 1
    except Terminated:
        return 143
    return 0


def run_training(
    config: RunConfig,
    run: RunDir,
    platform: Platform,
    ranks: Ranks,
    address: tuple[str, str],
    resume: bool = False,
) -> None:
    """Build the parts, train, and write the checkpoints and trainer.json.

    Raises ConfigError when the run has a training state and `resume` is not set: it would be overwritten.
    """
    check(config)
    check_offload(config.trainer.cpu_offload, platform)
    if not resume and (newest := newest_state(run.state_path)):
        raise ConfigError(
            f"this run has a training state, {newest}; give --resume to go on from it, or start another run"
        )
    torch.manual_seed(config.trainer.seed)
    t = config.trainer
    clock = Clock(platform.synchronize)
    client = TrainerClient(*address) if ranks.first else None
    records = Records(run if ranks.first else None, client, lambda: platform.memory()[0])
    source = BatchSource(client, ranks, config, run.stop_path)
    error: str | None = None
    together = True
    checkpoints: Checkpoints | None = None
    state: TrainingState | None = None
    sender: WeightsSender | None = None
    try:
        lm = load_causal_lm(config.model)
        if t.lora.rank:
            attach(lm, t.lora, t.seed)
        policy = shard(
            lm,
            ranks.mesh,
            getattr(torch, t.compute_dtype),
            kernel=platform.attention,
            sequence=ranks.sequence,
            activation_checkpointing=t.activation_checkpointing,
            cpu_offload=t.cpu_offload,
        )
        optimizer = Optimizer.of(t, policy.parameters())
        weights = config.weights.model_copy(
            update={"folder": config.weights.folder or str(run.path / "weights")}
        )
        sender = WeightsSender(lm, client, ranks, platform, weights, wire_dtype(weights, config.fleet), clock)
        companions = load_companions(config, ranks, platform)
        learner = Learner(policy, optimizer, ranks, t, clock, config.algorithm, companions)
        probe = Probe(client, ranks, learner, t.logprob_gap_bound)
        learned: dict[str, tuple[nn.Module, Optimizer]] = {"policy": (lm, optimizer)}
        if (critic := companions.critic) is not None:
            learned["critic"] = (critic.model, critic.optimizer)
        state = TrainingState(learned, ranks, platform, run.state_path, t.keep_checkpoints)
        version = start(state, records) if resume else 0
        checkpoints = Checkpoints(
            lm,
            state,
            run.path / "checkpoints",
            Path(config.model),
            t.checkpoint_every,
            t.keep_checkpoints,
            write=ranks.first,
            version=version,
        )
        train(
            config,
            learner,
            source,
            sender,
            probe,
            records,
            checkpoints,
            clock,
            version if resume else None,
        )
        checkpoints.finish(records.totals)
    except BaseException as e:
        error, together = _sentence(e), ranks.size == 1 or isinstance(e, RAISED_TOGETHER)
        raise
    finally:
        # A batch that is trained but not acked is in the weights and will be leased again: a run that went on
        # from such a state would train it twice.
        extra = None if source.lease_id is not None else records.totals
        source.give_back()
        if sender is not None:
            sender.close()
        if checkpoints is not None and error is not None:
            checkpoints.rescue(extra, together=together)
        if state is not None:
            state.close()
        records.finish(checkpoints.last if checkpoints is not None else None, error)
        if client is not None:
            client.close()


def start(state: TrainingState, records: Records) -> int:
    """Load the newest state; the version it holds, 0 (the model itself) when there is none."""
    progress = state.load() or {"version": 0, "extra": {}}
    records.resume(progress["version"], progress["extra"])
    return progress["version"]


def _sentence(e: BaseException) -> str:
    if isinstance(e, Terminated):
        return "terminated by a signal"
    said = f"{type(e).__name__}: {e}"
    return said if isinstance(e, ArealError) else f"{said}; the traceback is in logs/trainer.log"


def check(config: RunConfig) -> None:
    """Raise ConfigError for settings that cannot train: logprobs that mean something else than ours, an
    algorithm left open."""
    s = config.sampling
    if s.top_p != 1.0 or s.top_k != 0:
        raise ConfigError(
            f"sampling.top_p = {s.top_p:g}, sampling.top_k = {s.top_k}: the engine's logprobs are then of a "
            "truncated distribution, which the trainer does not compute; train with top_p 1 and top_k 0"
        )
    config.algorithm.check(config.rollout.max_staleness)
    _ = config.served_adapter
    if not config.model:
        raise ConfigError("`model` is not set; give the Hugging Face folder the policy starts from")


def gateway_address(run: RunDir, env: Mapping[str, str]) -> tuple[str, str]:
    """(url, admin key) from the environment, else from the run folder."""
    url = env.get("AREAL_GATEWAY_URL") or (run.read("gateway.json") or {}).get("url")
    if not url:
        raise ConfigError(
            f"no gateway: AREAL_GATEWAY_URL is not set and {run.path} holds no gateway.json; start "
            "`areal-agent gateway` first"
        )
    return url, env.get("AREAL_ADMIN_KEY") or run.admin_key()


def _terminate(signum: int, _: object) -> None:
    # Once is enough: a second signal must not break off the giving back of the lease.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise Terminated(signum)


if __name__ == "__main__":
    sys.exit(main())
