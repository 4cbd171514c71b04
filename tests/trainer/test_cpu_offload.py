"""trainer.cpu_offload: the same numbers, kept in host memory; refused where they are there anyway.

No accelerator is at hand, so torch's CPUOffloadPolicy runs on a CPU mesh, where every copy is from host to host.
What can be seen is that it reaches every model, that nothing else changes, and where gathered weights go.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from invariance_rank import VERSION, fixed_batch
from killed_trainer import in_ranks, run_trainer
from safetensors.torch import load_file
from test_loop import make_run
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from trainer_kit import MiniGateway, make_model

from areal_agent.config import RunConfig
from areal_agent.errors import ConfigError
from areal_agent.rundir import RunDir
from areal_trainers import main
from areal_trainers.algorithm.models import load_companions
from areal_trainers.batch import prepare
from areal_trainers.buckets import whole
from areal_trainers.checkpoint import gathered
from areal_trainers.clock import Clock
from areal_trainers.learner import Learner
from areal_trainers.lora import attach
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.optim import Optimizer
from areal_trainers.platform import PLATFORMS, check_offload, get_platform
from areal_trainers.platform.cpu import CpuPlatform
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.sft import train_sft


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with join_ranks(get_platform("cpu")) as joined:
        yield joined


def learner_of(model: Path, ranks: Ranks, *, offload: bool, lora: int = 0) -> Learner:
    """Everything at once: a critic, a reference, gradients summed over micro-batches, recomputed layers."""
    config = RunConfig.parse(
        {
            "model": str(model),
            "algorithm": {"recipe": "ppo", "kl": "loss"},
            "trainer": {
                "cpu_offload": offload,
                "learning_rate": 0.01,
                "microbatch_tokens": 60,
                "minibatches": 2,
                "grad_clip": 0.1,
                "lora": {"rank": lora},
            },
        }
    )
    lm = load_causal_lm(model)
    if lora:
        attach(lm, config.trainer.lora, 0)
    policy = shard(lm, ranks.mesh, activation_checkpointing=True, cpu_offload=offload)
    optimizer = Optimizer.of(config.trainer, policy.parameters())
    companions = load_companions(config, ranks, get_platform("cpu"))
    return Learner(policy, optimizer, ranks, config.trainer, Clock(), config.algorithm, companions)


def trained(learner: Learner) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics, weights) after a batch of two updates."""
    work = prepare(fixed_batch(), version=VERSION, max_staleness=9)
    proximal, _ = learner.proximal(work.items)
    metrics = learner.update(learner.experience(work, proximal).items, seed=0).metrics
    assert learner.companions.critic is not None
    parts = itertools.chain(gathered(learner.policy.lm), gathered(learner.companions.critic.model))
    return metrics, {f"{i} {name}": tensor.clone() for i, (name, tensor) in enumerate(parts)}


def units(root: nn.Module) -> list[FSDPModule]:
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


@pytest.mark.parametrize("offload", [True, False])
def test_every_unit_of_policy_reference_and_critic_is_told(model: Path, ranks: Ranks, offload: bool) -> None:
    learner = learner_of(model, ranks, offload=offload)
    reference, critic = learner.companions.reference, learner.companions.critic
    assert reference is not None
    assert critic is not None
    for root in (learner.policy, reference, critic.model):
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units(root)]
        assert len(groups) == 3  # two layers and the rest
        assert [isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups if g] == [offload] * 3


@pytest.mark.parametrize("lora", [0, 4])
def test_updates_are_the_same_bit_for_bit(model: Path, ranks: Ranks, lora: int) -> None:
    (metrics, with_it), (others, without) = (
        trained(learner_of(model, ranks, offload=offload, lora=lora)) for offload in (True, False)
    )
    assert metrics == others
    assert metrics["grad_norm"] > 0.1  # it was clipped
    start = trained(learner_of(model, ranks, offload=True, lora=lora))[1]
    assert all(torch.equal(start[name], tensor) for name, tensor in with_it.items())
    assert with_it.keys() == without.keys()
    for name, tensor in without.items():
        assert torch.equal(with_it[name], tensor), name


def test_a_gathered_weight_is_where_the_ranks_are_linked(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard in host memory of a mesh of devices. "meta" is the one device kind besides that every torch has."""
    _ = ranks  # a mesh asks the default group for its rank
    device = type("Handle", (), {"device_count": staticmethod(lambda: 1)})
    monkeypatch.setattr(device_mesh, "_get_device_handle", lambda _: device)
    mesh = DeviceMesh("meta", torch.arange(1), _init_backend=False)
    shard_of = DTensor.from_local(torch.ones(4, 2, device="meta"), mesh, run_check=False)
    shard_of._local_tensor = torch.ones(4, 2)
    there = DTensor(shard_of._local_tensor, shard_of._spec, requires_grad=False)  # type: ignore[call-arg]
    assert there.device.type == "cpu"
    assert whole(there).device.type == "meta"
    assert whole(shard_of).shape == (4, 2)


def _norm(folder: Path, out: Path) -> None:
    with join_ranks(get_platform("cpu")) as ranks:
        policies = [
            shard(load_causal_lm(folder), ranks.mesh, cpu_offload=offload) for offload in (True, False)
        ]
        norms = []
        for policy in policies:
            for p in policy.parameters():
                p.grad = p.detach() * 0.1
            norms.append(Optimizer(policy.parameters(), learning_rate=0.1, grad_clip=0.5).step())
        assert norms[0] == norms[1] > 0.5
        for (name, a), (_, b) in zip(*(gathered(p.lm) for p in policies), strict=True):
            assert torch.equal(a, b), name
        if ranks.first:
            out.write_text("same")


def test_two_ranks_clip_by_the_same_norm(model: Path, tmp_path: Path) -> None:
    in_ranks(_norm, 2, model, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "same"


def main_as_if_apart(arguments: list[str], *, apart: bool) -> int:
    """The trainer's main, on a CPU whose memory passes as a device's."""
    CpuPlatform.own_memory = apart
    return main.main(arguments)


def test_a_run_broadcasts_and_resumes_as_without(model: Path, tmp_path: Path) -> None:
    """Two ranks; the offloaded run is killed after its first checkpoint and goes on."""
    ends = []
    for offload in (False, True):
        run = make_run(tmp_path / str(offload), model, steps=4, checkpoint_every=2, cpu_offload=offload)
        program = functools.partial(main_as_if_apart, apart=offload)
        with MiniGateway(model, stale=True) as gateway:
            environment = {"AREAL_GATEWAY_URL": gateway.url, "AREAL_ADMIN_KEY": MiniGateway.KEY}

            def train(*options: str, kill: tuple[str, int] | None = None) -> tuple[int, str]:
                arguments = ["--run-dir", str(run.path), *options]  # noqa: B023  (called within the turn)
                log = run.log("trainer")  # noqa: B023
                return run_trainer(arguments, environment, log, kill, program=program, ranks=2)  # noqa: B023

            if offload:
                assert train(kill=("proximal", 4))[0] != 0
                assert run.resumable_version() == 2
            code, said = train(*["--resume"] * offload)
            assert code == 0, said
        ends.append(load_file(run.path / "checkpoints" / "latest" / "model.safetensors"))
        assert float((run.read("trainer.json") or {})["logprob_gap_max"]) < 1e-4
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_on_cpu_it_is_refused(model: Path, tmp_path: Path, ranks: Ranks) -> None:
    run: RunDir = make_run(tmp_path, model, cpu_offload=True)
    config = run.read_config()
    sentence = "trainer.cpu_offload = true, but on platform cpu"
    with pytest.raises(ConfigError, match=sentence):
        main.run_training(config, run, get_platform("cpu"), ranks, ("http://127.0.0.1:9", "key"))
    with pytest.raises(ConfigError, match=sentence):
        train_sft(model, tmp_path / "out", [([1, 2], [False, True])], config.trainer)


def test_accelerators_allow_it() -> None:
    for name, make in PLATFORMS.items():
        if name != "cpu":
            check_offload(True, make())
