"""Does this machine train? One short self-check of a platform, without engines, data or a model.

    python -m areal_trainers.check --platform auto
    torchrun --nproc-per-node N -m areal_trainers.check        (collectives between N devices as well)

Each check compares what the device computes with the CPU in float64. A row of the table is a check with what it
found against its bound; the exit code is 1 when one failed, 2 when there is no such platform here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from areal_agent.errors import ArealError, ConfigError
from areal_trainers import attention
from areal_trainers.logprobs import head_logprobs, token_logprobs
from areal_trainers.model import Policy, shard
from areal_trainers.optim import Optimizer
from areal_trainers.packing import Item, MicroBatch, pack
from areal_trainers.platform import Platform, get_platform
from areal_trainers.ranks import Ranks, join_ranks
from areal_trainers.state import TrainingState

LENGTHS = (37, 64, 5, 120)
"""Sequences of the packed row that everything is computed on."""

BROADCAST_MIB = 256


@dataclass(frozen=True)
class Finding:
    """What a check found: `value` is to be at most `bound` (no bound: for information)."""

    check: str
    value: float
    bound: float | None
    unit: str

    @property
    def passed(self) -> bool:
        return self.bound is None or self.value <= self.bound


def tiny(seed: int = 0) -> PreTrainedModel:
    """A random Qwen3 of two layers, float32, on the CPU."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(attention.NAME)
    return model.eval()


def row(device: torch.device | str) -> MicroBatch:
    """One packed row of random tokens, all of them predicted."""
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 512, (n,), generator=draw).numpy() for n in LENGTHS]
    return pack([Item(t, t >= 0) for t in tokens], range(len(LENGTHS)), device)


def gradients(policy: Policy, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Logprobs, and gradients of their mean by name, as float64 on the CPU. A collective over the ranks."""
    logprobs, _ = policy(row(device))
    logprobs.mean().backward()
    out = {"logprobs": logprobs.detach()}
    for name, p in policy.lm.named_parameters():
        assert p.grad is not None
        out[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return {name: value.double().cpu() for name, value in out.items()}


def fsdp(platform: Platform, ranks: Ranks) -> Iterator[Finding]:
    """A step through FSDP2, in float32 and in the platform's own dtype, and that offloaded where it can be."""
    exact = gradients(Policy(tiny().double()), "cpu")
    kinds = [(dtype, False) for dtype in dict.fromkeys((torch.float32, platform.default_dtype))]
    for dtype, offload in [*kinds, *([(platform.default_dtype, True)] if platform.own_memory else [])]:
        bound = 1e-3 if dtype == torch.float32 else 0.1
        policy = shard(tiny(), ranks.mesh, dtype, kernel=platform.attention, cpu_offload=offload)
        found = gradients(policy, ranks.device)
        name = f"FSDP2, {str(dtype).removeprefix('torch.')}{', offloaded' if offload else ''}"
        yield Finding(
            f"{name}: logprobs", float((found["logprobs"] - exact["logprobs"]).abs().max()), bound, "nats"
        )
        worst = max(float((found[n] - g).norm() / g.norm()) for n, g in exact.items() if n != "logprobs")
        yield Finding(f"{name}: gradient", worst, bound, "relative")
        norm = float(torch.stack([g.norm() for n, g in found.items() if n != "logprobs"]).norm())
        clipped = Optimizer(policy.parameters(), learning_rate=1e-3).step()
        yield Finding(f"{name}: norm to clip by", abs(clipped / norm - 1), 1e-3, "relative")
        if offload:
            away = sum(p.device.type != "cpu" for p in policy.parameters())
            yield Finding(f"{name}: weights not in host memory", away, 0, "tensors")


def head(platform: Platform, ranks: Ranks) -> Iterator[Finding]:
    """The chunked output head against all logits at once."""
    draw = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(300, 64, generator=draw), torch.randn(1000, 64, generator=draw) / 8
    labels, temperatures = torch.randint(0, 1000, (300,), generator=draw), torch.full((300,), 0.8)
    exact, _ = token_logprobs(hidden.double() @ weight.double().T, labels, temperatures)
    device = ranks.device
    found, _ = head_logprobs(
        hidden.to(device), weight.to(device), None, labels.to(device), temperatures.to(device), 50_000
    )
    yield Finding("fused output head", float((found.double().cpu() - exact).abs().max()), 1e-3, "nats")


def kernel(platform: Platform, ranks: Ranks) -> Iterator[Finding]:
    """The platform's attention in bfloat16 against dense attention, with and without a window."""
    name = attention.choose_kernel(platform.attention, torch.bfloat16)
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(sum(LENGTHS), h, 64, generator=draw).bfloat16() for h in (4, 2, 2))
    for window in (None, 16):
        exact, at = [], 0
        for n in LENGTHS:
            one, its_k, its_v = (x[at : at + n].double().transpose(0, 1) for x in (q, k, v))
            back = torch.arange(n)[:, None] - torch.arange(n)[None]
            seen = (back >= 0) & (back < (window or n))
            out = torch.nn.functional.scaled_dot_product_attention(one, its_k, its_v, seen, enable_gqa=True)
            exact.append(out.transpose(0, 1))
            at += n
        layout = attention.Layout.of(LENGTHS, ranks.device)
        on_device = (q.to(ranks.device), k.to(ranks.device), v.to(ranks.device))
        found = attention.KERNELS[name](*on_device, layout, None, window)
        worst = float((found.double().cpu() - torch.cat(exact)).abs().max())
        yield Finding(f"attention {name}{', window' if window else ''}", worst, 0.05, "largest error")


def state(platform: Platform, ranks: Ranks) -> Iterator[Finding]:
    """A training state written and read back into another model: the differing elements."""
    with tempfile.TemporaryDirectory() as local:
        folder = Path(ranks.broadcast_bytes(local.encode()).decode())
        learnt, fresh = (shard(tiny(seed), ranks.mesh) for seed in (0, 1))
        optimizers = [Optimizer(p.parameters(), learning_rate=0.01) for p in (learnt, fresh)]
        for p in learnt.parameters():
            p.grad = p.detach() * 0.1
        optimizers[0].step()
        start = time.monotonic()
        for policy, optimizer in zip((learnt, fresh), optimizers, strict=True):
            states = TrainingState({"policy": (policy.lm, optimizer)}, ranks, platform, folder, 1)
            if policy is learnt:
                states.save(1)
                states.wait()
            else:
                states.load()
            states.close()
        seconds = time.monotonic() - start
        pairs = zip(learnt.parameters(), fresh.parameters(), strict=True)
        differing = ranks.max([float(sum(int((a != b).sum()) for a, b in map(_local, pairs)))])[0]
    yield Finding("training state, read back", differing, 0, "elements differ")
    yield Finding("training state, written and read", seconds, None, "s")


def _local(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (x.to_local() if isinstance(x, DTensor) else x for x in pair)
    return a.detach(), b.detach()


def collectives(platform: Platform, ranks: Ranks) -> Iterator[Finding]:
    """A group of the kind that weights are sent over, and with several ranks their sums and a broadcast."""
    # Alone it is only built, which is what a wrong driver or collective library fails at.
    alone = platform.process_group(HashStore(), 0, 1, timedelta(seconds=30), loopback=True)
    yield Finding(f"{platform.backend} group of its own", float(alone.size() - 1), 0, "members too many")
    if ranks.size == 1:
        return
    wrong = abs(ranks.sum([float(ranks.rank)])[0] - ranks.size * (ranks.size - 1) / 2)
    yield Finding(f"{platform.backend} sum over {ranks.size} ranks", wrong, 0, "off")
    body = torch.full((BROADCAST_MIB * 2**20 // 4,), float(ranks.rank + 1), device=ranks.device)
    dist.broadcast(body[:1], 0)
    platform.synchronize()
    start = time.monotonic()
    dist.broadcast(body, 0)
    platform.synchronize()
    seconds = time.monotonic() - start
    yield Finding("broadcast: wrong elements", float((body != 1.0).sum()), 0, "elements")
    yield Finding(f"broadcast of {BROADCAST_MIB} MiB", BROADCAST_MIB / 1024 / seconds, None, "GiB/s")


CHECKS: tuple[Callable[[Platform, Ranks], Iterator[Finding]], ...] = (fsdp, head, kernel, state, collectives)


def run(platform: Platform, ranks: Ranks) -> list[Finding]:
    """All checks; one that raises is a finding that failed, and the rest still run where no rank waits."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check(platform, ranks)
        except Exception as e:  # whatever a driver or library raises is what the check is there to show
            found.append(Finding(f"{check.__name__}: {type(e).__name__}: {e}", float("inf"), 0, "raised"))
            if ranks.size > 1:
                break
    return found


def table(platform: Platform, ranks: Ranks, found: list[Finding]) -> Table:
    out = Table(title=f"{platform.name}, {ranks.size} x {ranks.device}, torch {torch.__version__}")
    for column in ("check", "found", "at most", ""):
        out.add_column(column, justify="left" if column in ("check", "") else "right", overflow="fold")
    for f in found:
        bound = "" if f.bound is None else f"{f.bound:g}"
        out.add_row(f.check, f"{f.value:.3g} {f.unit}", bound, "ok" if f.passed else "FAILED")
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m areal_trainers.check",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="More devices: torchrun --nproc-per-node N -m areal_trainers.check",
    )
    parser.add_argument("--platform", default="auto", help="auto, cpu, cuda or npu (default: %(default)s)")
    a = parser.parse_args(argv)
    try:
        platform = get_platform(a.platform)
        with join_ranks(platform) as ranks:
            found = run(platform, ranks)
            failed = ranks.max([float(not all(f.passed for f in found))])[0]
            if ranks.first:
                Console().print(table(platform, ranks, found))
    except ArealError as e:
        print(f"areal_trainers.check: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
