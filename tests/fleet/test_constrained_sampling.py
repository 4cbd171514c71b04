"""Guided decoding on a real engine: the constraint holds, and the logprobs are those of what was sampled."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import start_vllm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_agent.config import GatewayConfig
from areal_gateway.constraint import Constraint
from areal_gateway.fleet.protocol import EngineRefused
from areal_gateway.fleet.spans import SpansDriver
from areal_gateway.fleet.types import EngineSampling
from areal_gateway.tokens import QWEN3_TOKENS, Tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"$ref": "#/$defs/Unit"}},
                "required": ["unit"],
                "additionalProperties": False,
                "$defs": {"Unit": {"enum": ["km", "mile"]}},
            },
        },
    }
    for name in ("measure", "convert")
]
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["km", "mile"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a byte-level tokenizer: one token a byte, and Qwen3's markup."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("bytes") / "model"
    torch.manual_seed(0)
    names = [*QWEN3_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(QWEN3_TOKENS))
    config = Qwen3Config(
        vocab_size=288, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, url = start_vllm(folder, tmp_path_factory.mktemp("log") / "engine.log")
    yield url
    process.terminate()


@pytest.fixture
async def client(url: str) -> AsyncIterator[SpansDriver]:
    client = SpansDriver(url, None)
    client.model = await client.model_name(5)
    await client.stamp(0, 5)
    yield client
    await client.close()


async def sample(
    client: SpansDriver, tokens: Tokens, outputs: dict[str, Any], seed: int
) -> tuple[list[int], list[float | None], list[list[tuple[int, float]]], str | None]:
    sampling = EngineSampling(
        max_tokens=600, seed=seed, top_logprobs=20, stop_token_ids=tokens.stop_token_ids,
        extra={"structured_outputs": outputs},
    )  # fmt: skip
    prompt = tokens.render([{"role": "user", "content": "How far?"}], TOOLS)
    chunks = [c async for c in client.generate(prompt, sampling, 120)]
    ids = [t for c in chunks for t in c.token_ids]
    logprobs = [p for c in chunks for p in c.logprobs]
    return ids, logprobs, [t for c in chunks for t in c.top or ()], chunks[-1].finish_reason


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("constraint", "tools"),
    [
        (Constraint(("f",), SCHEMA), []),
        (Constraint(("f",), SCHEMA), TOOLS),
        (Constraint(("f",), None, ("convert",), parallel=False), TOOLS),
        (Constraint(("f",), None, ("measure", "convert")), TOOLS),
    ],
    ids=["json", "json or tools", "one tool", "any tool"],
)
async def test_a_reply_is_what_it_may_be_and_its_logprobs_are_of_what_was_allowed(
    client: SpansDriver, folder: Path, constraint: Constraint, tools: list[Any], thinking: bool
) -> None:
    tokens = Tokens.load(folder, GatewayConfig(enable_thinking=thinking), 1024)
    outputs = constraint.structured_outputs(tools, tokens.syntax)
    assert outputs is not None
    ended = narrow = 0
    for seed in range(6):
        ids, logprobs, tops, finish = await sample(client, tokens, outputs, seed)
        assert len(ids) == len(logprobs) == len(tops)
        for token, logprob, top in zip(ids, logprobs, tops, strict=True):
            assert logprob is not None
            if len(top) < 20:  # nothing else had any probability: what was allowed shares all of it
                narrow += 1
                assert sum(math.exp(p) for _, p in top) == pytest.approx(1, abs=1e-3)
                assert dict(top)[token] == logprob
        if finish != "stop":
            continue  # a random model may write white space, or think, until its limit
        ended += 1
        parsed = tokens.parse(ids, [], tools)
        if parsed.tool_calls:
            assert tools
            assert all(c.name in (constraint.forced or ("measure", "convert")) for c in parsed.tool_calls)
            assert all(c.arguments in ({"unit": "km"}, {"unit": "mile"}) for c in parsed.tool_calls)
            assert constraint.parallel or len(parsed.tool_calls) == 1
        else:
            assert constraint.forced is None
            assert set(json.loads(parsed.content)) == {"unit", "exact"}
    assert narrow > 20
    assert ended or thinking


async def test_a_grammar_that_cannot_be_kept_is_refused(client: SpansDriver, folder: Path) -> None:
    tokens = Tokens.load(folder, GatewayConfig(), 1024)
    with pytest.raises(EngineRefused) as e:
        await sample(client, tokens, {"json": {"type": "no such type"}}, 0)
    assert e.value.status == 400
