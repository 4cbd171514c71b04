"""The training loop: lease, compare, re-evaluate, step, push, probe, confirm.

Invariant: version v of the fleet is the policy after v batches; a batch is acked only after the version
it made is live, so that a crash anywhere repeats it rather than losing it. A resumed trainer starts at its
checkpoint's version: it has the batches since given out again and its weights back in the engines first, and
goes on as an uninterrupted one would, bit for bit.
"""

from __future__ import annotations

from areal_agent.config import RunConfig
from areal_trainers.batch import check_gap, prepare
from areal_trainers.checkpoint import Checkpoints
from areal_trainers.clock import Clock
from areal_trainers.learner import Learner
from areal_trainers.probe import Probe
from areal_trainers.records import Records
from areal_trainers.source import BatchSource
from areal_trainers.weights_sender import WeightsSender


def train(
    config: RunConfig,
    learner: Learner,
    source: BatchSource,
    sender: WeightsSender,
    probe: Probe,
    records: Records,
    checkpoints: Checkpoints,
    clock: Clock,
    resume: int | None = None,
) -> None:
    """Train to version `trainer.steps`, or until the run is asked to stop. Raises an ArealError when training cannot go on.

    resume: the version the policy holds, when an earlier process trained it.
    """
    if resume is not None:
        source.rewind(resume)
        sender.push(resume, force=True)
    for version in range(resume or 0, config.trainer.steps):
        with clock("lease"):
            batch = source.next(version, sender.push)
        if batch is None:
            break
        work = prepare(
            batch,
            version=version,
            max_staleness=config.rollout.max_staleness,
            dynamic_sampling=config.algorithm.dynamic_sampling,
        )
        with clock("proximal"):
            proximal, entropy = learner.proximal(work.items)
        gap = check_gap(work, proximal, config.trainer.logprob_gap_bound)
        experience = learner.experience(work, proximal)
        with checkpoints.changing(version + 1):
            update = learner.update(experience.items, seed=config.trainer.seed + version)
        with clock("broadcast"):
            pushed = sender.push(version + 1)
        with clock("probe"):
            probed = probe.check(batch, version + 1)
        source.ack()
        records.step(
            version + 1,
            work.metrics
            | experience.metrics
            | update.metrics
            | entropy
            | {"logprob_gap": gap.value, "logprob_gap_tokens": gap.tokens}
            | {"probe_gap": probed.value, "probe_tokens": probed.tokens}
            | {"pause_s": pushed.pause_s, "weight_attempts": pushed.attempts, "engines": pushed.engines}
            | {f"{phase}_s": seconds for phase, seconds in clock.lap().items()},
        )
        checkpoints.step(records.totals)
