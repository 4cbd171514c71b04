"""What engines that serve a LoRA adapter start with: one that changes nothing, under the name requests use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from peft import PeftModel
from safetensors.numpy import save_file
from test_launch import SPEC, option
from transformers import AutoModelForCausalLM

from areal_agent.config import LoRAConfig
from areal_agent.errors import ConfigError
from areal_gateway.fleet.adapter import EngineAdapter, write_first_adapter
from areal_gateway.fleet.http import EngineHTTP
from areal_gateway.fleet.process import engine_args


def test_it_is_an_adapter_for_peft_and_changes_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    """peft warns of layers the file lacks: it takes a name for all that end in it."""
    adapter = write_first_adapter(tmp_path / "adapter", models["tied"], LoRAConfig(rank=6, alpha=12.0))
    assert adapter == EngineAdapter(tmp_path / "adapter", 8)
    ids = torch.arange(10, 30)[None]
    base = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32).eval()
    with torch.no_grad():
        want = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(adapter.folder)).eval()
        assert sum(".lora_" in name for name, _ in adapted.named_parameters()) >= 2
        assert torch.equal(adapted(ids).logits, want)


def test_a_model_without_a_layer_to_adapt_is_refused(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": np.zeros((4, 4), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"leave weights\.adapter merged"):
        write_first_adapter(tmp_path / "adapter", tmp_path, LoRAConfig(rank=6))


def test_requests_name_the_adapter(tmp_path: Path) -> None:
    command = engine_args(replace(SPEC, adapter=EngineAdapter(tmp_path, 8))).command
    assert option(command, "--lora-modules") == f"policy={tmp_path}"
    assert option(command, "--served-model-name") == "base"
    assert option(command, "--max-lora-rank") == "8"
    assert option(command, "--max-loras") == "1"
    assert "--enable-lora" not in engine_args(SPEC).command


@pytest.mark.parametrize(("listed", "name"), [(["base", "policy"], "policy"), (["theirs"], "theirs")])
async def test_the_name_of_an_attached_engine(listed: list[str], name: str) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": n} for n in listed]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = EngineHTTP(f"http://127.0.0.1:{runner.addresses[0][1]}", None)
    try:
        assert await engine.model_name(5) == name
    finally:
        await engine.close()
        await runner.cleanup()
