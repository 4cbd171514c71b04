"""A run's newest training state as a Hugging Face folder, in one process, whatever ranks saved it."""

from __future__ import annotations

from pathlib import Path

import torch

from areal_agent.errors import ConfigError
from areal_agent.rundir import RunDir, newest_state
from areal_trainers.checkpoint import export
from areal_trainers.lora import attach
from areal_trainers.model import load_causal_lm
from areal_trainers.optim import Optimizer
from areal_trainers.platform import get_platform
from areal_trainers.ranks import join_ranks
from areal_trainers.state import TrainingState


def export_run(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the folder `out` (RUN_DIR/export/step-N by default) and return it.

    It needs no device and touches nothing of the run, which may be going on. Raises ConfigError when the run
    has no training state yet.
    """
    run = RunDir(run_dir)
    config = run.read_config()
    newest = newest_state(run.state_path)
    if newest is None:
        raise ConfigError(
            f"{run.path} has no training state yet; the first comes after trainer.checkpoint_every = "
            f"{config.trainer.checkpoint_every} steps"
        )
    platform = get_platform("cpu")
    with join_ranks(platform) as ranks:
        lm = load_causal_lm(config.model)
        if config.trainer.lora.rank:
            attach(lm, config.trainer.lora, config.trainer.seed)
        weights = Optimizer(lm.parameters(), learning_rate=1.0)
        state = TrainingState({"policy": (lm, weights)}, ranks, platform, None, 1)
        state.load(newest)
        state.close()
        folder = Path(out) if out is not None else run.path / "export" / newest.name
        with torch.no_grad():
            return export(lm, folder, Path(config.model), write=True)
