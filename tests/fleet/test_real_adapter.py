"""Real vLLM that serves a LoRA adapter: after each update every token is the new adapter's, to float32."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from fakes.sender import Sender
from fleet_kit import run_config, until
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from real_kit import PROMPT, TOLERANCE, reply
from transformers import AutoModelForCausalLM

from areal_agent.errors import WeightUpdateError
from areal_agent.weights import Adapter
from areal_gateway.fleet import Fleet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

RANK, ALPHA = 6, 12.0


class Adapters:
    """peft's own model and forward, with an adapter drawn anew for every version; version 0 changes nothing."""

    def __init__(self, path: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(base, config).eval()  # type: ignore[arg-type]
        leaves = {n.split(".")[-3] for n, _ in self.model.named_parameters() if ".lora_" in n}
        self.spec = Adapter(rank=RANK, alpha=ALPHA, target_modules=tuple(sorted(leaves)))

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if ".lora_" in name:
                    p.copy_(torch.randn(p.shape, generator=draw) * 0.1 * bool(version))
        return {n: t.detach().clone() for n, t in get_peft_model_state_dict(self.model).items()}

    def logprobs(self, version: int, reply: list[int]) -> torch.Tensor:
        self.tensors(version)
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + reply])).logits[0]
        picked = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
        return picked.gather(1, torch.tensor(reply)[:, None])[:, 0]


async def test_adapter_updates_on_a_real_engine(models: dict[str, Path], tmp_path: Path) -> None:
    config = run_config(
        trainer={"lora": {"rank": RANK, "alpha": ALPHA}},
        fleet={
            "engines": 1,
            "start_timeout_s": 240,
            "max_model_len": 1024,
            "kv_cache_gib": 0.5,
            "call_timeout_s": 120,
        },
        weights={
            "adapter": "adapter",
            "join_timeout_s": 20,
            "transfer_timeout_s": 20,
            "pause_timeout_s": 20,
        },
        gateway={"hold_timeout_s": 120},
    )
    config.model = str(models["tied"])
    adapters, sender = Adapters(models["tied"]), Sender()
    largest = 0.0

    def check(ids: list[int], logprobs: torch.Tensor, spans: list) -> None:
        nonlocal largest
        for start, end, version in spans:
            gap = (logprobs - adapters.logprobs(version, ids))[start:end].abs().max()
            largest = max(largest, float(gap))
            assert gap < TOLERANCE, f"span {start}..{end} is not v{version}: {gap}"

    fleet = Fleet(config, tmp_path, lambda _: None)
    await fleet.start()
    try:
        ids, logprobs, spans = await reply(fleet, 40)
        assert spans == [(0, 40, 0)]
        check(ids, logprobs, spans)
        # Versions differ enough for the comparison to tell.
        assert (adapters.logprobs(1, ids) - logprobs).abs().max() > 100 * TOLERANCE

        for version in (1, 2, 3):
            tensors = adapters.tensors(version)
            await sender.push(fleet.weights, version, tensors, bucket_bytes=1 << 14, adapter=adapters.spec)
            ids, logprobs, spans = await reply(fleet, 40)
            assert spans == [(0, 40, version)]
            check(ids, logprobs, spans)

        # Replies that live through an update: exact on both sides of the boundary.
        tensors = adapters.tensors(4)
        calls = [asyncio.create_task(reply(fleet, 300, f"s{i}")) for i in range(4)]
        await until(lambda: sum(m.calls for m in fleet.members) == 4)
        await asyncio.sleep(0.3)
        await sender.push(fleet.weights, 4, tensors, adapter=adapters.spec)
        for ids, logprobs, spans in await asyncio.gather(*calls):
            assert [v for _, _, v in spans] == [3, 4]
            check(ids, logprobs, spans)
        print(f"largest gap {largest:.2g} nats")

        assert fleet.version == 4

        # An adapter for a layer that this engine does not adapt is refused, not half applied.
        wrong = {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(RANK, 128)}
        wrong |= {"base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": torch.zeros(128, RANK)}
        with pytest.raises(WeightUpdateError, match=r"applies no adapter to model\.layers\.9"):
            await sender.push(fleet.weights, 5, tensors | wrong, adapter=adapters.spec)
        sender.leave()
    finally:
        await fleet.stop()
