"""How the tests of this folder get fleets: fakes in this process, fakes as processes, real vLLM."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes.engine import FakeEngine

from areal_agent.config import RunConfig
from areal_agent.launch.process import Guarded
from areal_gateway.fleet import Fleet
from areal_gateway.fleet.process import EngineArgs, LaunchSpec, engine_args, free_port, last_words

if TYPE_CHECKING:
    import torch

FAKE = Path(__file__).parent.parent / "fakes" / "engine.py"


def tiny_qwen3(path: Path, *, tied: bool, seed: int = 0) -> Path:
    """A random Qwen3 of 0.6 M parameters with a one-token-per-word tokenizer, saved to `path`."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(320)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t2").save_pretrained(path)
    return path


class Policies:
    """A Hugging Face model whose weights are moved to those of any version, and back."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._first = {k: v.clone() for k, v in self.model.state_dict().items()}

    def go_to(self, version: int) -> None:
        import torch

        self.model.load_state_dict(self._first)
        if version:
            g = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for p in self.model.parameters():  # every one, norms included
                    p.add_(torch.randn(p.shape, generator=g) * 0.05)

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """What a trainer would send: parameters, a tied head only once."""
        self.go_to(version)
        return {k: v.detach().clone() for k, v in self.model.named_parameters()}

    def logprobs(self, version: int, prompt: list[int], reply: list[int]) -> torch.Tensor:
        """[len(reply)], of each reply token given all before it."""
        import torch

        self.go_to(version)
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + reply])).logits[0]
        picked = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return picked.gather(1, torch.tensor(reply)[:, None])[:, 0]

    def logprobs_of_all(
        self, version: int, prompt: list[int], replies: list[list[int]], at_once: int = 16
    ) -> list[list[float]]:
        """As `logprobs`, of many replies, padded together: a forward each would cost more than the engines do."""
        import torch

        self.go_to(version)
        out: list[list[float]] = []
        for first in range(0, len(replies), at_once):
            some = replies[first : first + at_once]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt + r) for r in some], batch_first=True)
            with torch.no_grad():  # padding comes after what counts, and attention is causal
                picked = self.model(ids).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
            chosen = picked.gather(2, ids[:, len(prompt) :, None])[..., 0]
            out += [row[: len(r)].tolist() for row, r in zip(chosen, some, strict=True)]
        return out


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """A run's config with deadlines short enough for tests."""
    values: dict[str, Any] = {
        "fleet": {"probe_s": 0.2, "start_timeout_s": 20, "call_timeout_s": 20, "max_restarts": 2},
        "weights": {"join_timeout_s": 3, "transfer_timeout_s": 3, "pause_timeout_s": 1},
        "gateway": {"hold_timeout_s": 5},
    }
    for name, more in sections.items():
        values[name] = values.get(name, {}) | more
    return RunConfig.parse(values)


def fake_command(*args: str) -> Callable[[LaunchSpec], EngineArgs]:
    """Starts the fake engine as a process instead of vLLM."""

    def command(spec: LaunchSpec) -> EngineArgs:
        line = [sys.executable, str(FAKE), "--port", str(spec.port), "--served-model-name", "policy", *args]
        return EngineArgs(line, {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})

    return command


async def until(
    true: Callable[[], object], timeout_s: float = 5.0, context: Callable[[], object] = lambda: ""
) -> None:
    """Poll until it is true."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"not in {timeout_s} s: {context()}"
        await asyncio.sleep(0.01)


class Harness:
    """A fleet attached to fake engines, and what it reported."""

    def __init__(self, fleet: Fleet, engines: list[FakeEngine], events: list[dict[str, Any]]) -> None:
        self.fleet, self.engines, self.events = fleet, engines, events

    def states(self) -> list[str]:
        return [e["state"] for e in self.fleet.status()["engines"]]

    async def until(self, true: Callable[[], object], timeout_s: float = 5.0) -> None:
        await until(true, timeout_s, lambda: self.fleet.status())


@asynccontextmanager
async def fake_fleet(tmp_path: Path, n: int = 2, *, config: RunConfig | None = None, **engine: Any):
    """`n` in-process fakes and a started Fleet attached to them."""
    events: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(seed=i, **engine)) for i in range(n)]
        config = (config or run_config()).model_copy(deep=True)
        config.fleet.attach = [e.url for e in engines]
        fleet = Fleet(config, tmp_path, events.append)
        await fleet.start()
        stack.push_async_callback(fleet.stop)
        yield Harness(fleet, engines, events)


def start_vllm(model: Path, log: Path) -> tuple[Guarded, str]:
    """A real engine as the fleet would start it: (process, url). Synchronous: it outlives event loops."""
    config = RunConfig.parse({"fleet": {"max_model_len": 1024, "max_num_seqs": 32, "kv_cache_gib": 0.5}})
    spec = LaunchSpec(
        model=str(model),
        port=free_port(),
        index=0,
        engines=1,
        platform="cpu",
        trainer_ranks=1,
        fleet=config.fleet,
    )
    args = engine_args(spec)
    process = Guarded.start(args.command, env=os.environ | args.env, log_path=log)
    url, end = f"http://127.0.0.1:{spec.port}", time.monotonic() + 240
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=2):
                return process, url
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                process.terminate()
                pytest.fail(f"vLLM did not start: {last_words(process.tail(200))}")
            time.sleep(0.3)
