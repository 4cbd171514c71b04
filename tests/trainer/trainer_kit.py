"""What the trainer's tests share: tiny models, an oracle for logprobs, and a gateway small enough to trust.

`MiniGateway` speaks the admin API's lease and weight calls over real HTTP. Its "engine" is a Hugging Face
model that samples with plain forwards and takes its weights from the trainer's broadcast alone, so a wrong
weight or a wrong logprob shows as a gap.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from areal_agent import wire
from areal_agent.trajectory import Batch, Sequence

torch.set_num_threads(1)
"""The models are too small for two, and idle OpenMP threads spin against whatever else the machine runs."""

VOCAB = 48
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
CONFIGS = {
    "qwen3 tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3 untied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "mistral, window 6": lambda: MistralConfig(**SIZES, sliding_window=6),
}


def make_model(folder: Path, kind: str = "qwen3 tied", seed: int = 0) -> Path:
    """A random model, peaked enough that its logprobs differ from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(6.0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"made": "by the test"}')
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The oracle: the model with transformers' own eager attention, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """[L] float64 logprob of each token given those before it; 0 for the first."""
    logits = model(torch.tensor([ids])).logits[0].double() / temperature
    out = np.zeros(len(ids))
    out[1:] = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    return out


@torch.no_grad()
def sample(model: PreTrainedModel, ids: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [B, L] -> ([B, n] sampled ids, [B, n] logprobs)."""
    tokens, logprobs = [], []
    for _ in range(n):
        logp = model(ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1)
        tokens.append(token)
        logprobs.append(logp.gather(-1, token))
        ids = torch.cat([ids, token], 1)
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


class MiniGateway:
    """Leases batches of sampled sessions; takes weights into its model. Runs in a thread.

    Args:
        model: folder that engine and trainer start from.
        stale: the first half of every reply is sampled by the version before, as in a call that lived
            through an update.
        fail_commits: so many commits answer `weights_retry`.
        corrupt: added to one recorded logprob per batch.
        corrupt_probe: added to the first logprob of every probe's reply.
        ready: leases given out before the gateway has nothing more.
        crash_after: with this version committed the engine restarts, so that it waits for the version's
            weights and no batch is ready until they came.
        expire: a lease that is not renewed ends after its `lease_s`, and is not acked then.
    """

    KEY = "test-admin-key"

    def __init__(
        self,
        model: Path,
        *,
        groups: int = 4,
        size: int = 4,
        reply: int = 6,
        stale: bool = False,
        fail_commits: int = 0,
        corrupt: float = 0.0,
        corrupt_probe: float = 0.0,
        ready: int = 10**9,
        crash_after: int | None = None,
        expire: bool = False,
    ) -> None:
        self.models = {0: reference(model)}
        self.groups, self.size, self.reply, self.stale = groups, size, reply, stale
        self.fail_commits, self.corrupt, self.ready = fail_commits, corrupt, ready
        self.corrupt_probe, self.crash_after = corrupt_probe, crash_after
        self.needs_weights = False
        self.expire = expire
        self.ends: dict[str, float] = {}
        self.version, self.epoch, self.leases = 0, 0, 0
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.acked: list[str] = []
        self.nacked: list[str] = []
        self.given: list[tuple[int, Batch]] = []
        self.again: list[Batch] = []
        self.sampled = 0
        self.update: dict[str, Any] | None = None
        self.receiver: Any = None
        self.joined: tuple[Any, ...] | None = None
        self.rewards: list[float] = []
        self.generator = torch.Generator().manual_seed(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._bound = threading.Event()
        self.url = ""

    def __enter__(self) -> MiniGateway:
        self._thread.start()
        assert self._bound.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if self.receiver is not None:
            self.receiver.abort()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def names(self, prefix: str = "") -> list[str]:
        return [path for path, _ in self.calls if path.startswith(prefix)]

    # server

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/admin/{area}/{action}", self._handle)
        app.router.add_post("/admin/metrics", self._handle)
        app.router.add_get("/admin/status", self._handle)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._bound.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        path = request.path.removeprefix("/admin/")
        self.calls.append((path, body))
        if request.headers.get("Authorization") != f"Bearer {self.KEY}":
            return self._error(401, "unauthorized", "wrong admin key")
        answer = {
            "trajectories/lease": self.lease,
            "trajectories/ack": self.ack,
            "trajectories/nack": self.nack,
            "trajectories/renew": self.renew,
            "trajectories/rewind": self.rewind,
            "weights/begin": self.begin,
            "weights/commit": self.commit,
            "weights/abort": self.abort,
            "weights/probe": self.probe,
            "metrics": self.metrics,
            "status": self.status,
        }[path]
        return await answer(body)

    @staticmethod
    def _error(status: int, code: str, message: str) -> web.Response:
        return web.json_response({"error": {"message": message, "code": code}}, status=status)

    # trajectories

    async def lease(self, body: dict[str, Any]) -> web.StreamResponse:
        if self.version == self.crash_after:
            self.needs_weights, self.crash_after = True, None
            self.models[self.version] = copy.deepcopy(self.models[0])
            self.receiver.abort()
            self.receiver, self.joined = None, None
        if self.leases >= self.ready or self.needs_weights:
            await asyncio.sleep(min(body["wait_s"], 0.1 if self.needs_weights else 10))
            return web.Response(status=204)
        self.leases += 1
        name = f"lease-{self.leases}"
        self.ends[name] = time.monotonic() + body["lease_s"]
        batch = replace(self.again.pop(0), lease_id=name) if self.again else self.batch(name)
        self.given.append((self.version, batch))
        return web.Response(body=wire.pack(batch), content_type=wire.MEDIA_TYPE)

    async def renew(self, body: dict[str, Any]) -> web.StreamResponse:
        if self.ended(body["lease_id"]):
            return self._error(409, "lease_ended", "it expired")
        self.ends[body["lease_id"]] = time.monotonic() + body["lease_s"]
        return web.json_response({})

    def ended(self, lease_id: str) -> bool:
        return self.expire and time.monotonic() > self.ends[lease_id]

    async def rewind(self, body: dict[str, Any]) -> web.StreamResponse:
        """What tests/gateway/test_rewind.py holds the real gateway to."""
        lost = [b for v, b in self.given if v >= body["version"]]
        self.given = [(v, b) for v, b in self.given if v < body["version"]]
        self.again = lost + self.again
        return web.json_response({"version": body["version"], "batches": len(self.again)})

    async def ack(self, body: dict[str, Any]) -> web.StreamResponse:
        if self.ended(body["lease_id"]):
            return self._error(409, "lease_ended", "it expired")
        self.acked.append(body["lease_id"])
        return web.json_response({})

    async def nack(self, body: dict[str, Any]) -> web.StreamResponse:
        self.nacked.append(body["lease_id"])
        return web.json_response({})

    async def status(self, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"fleet": {"version": self.version, "needs_weights": self.needs_weights}})

    async def metrics(self, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({})

    def batch(self, lease_id: str) -> Batch:
        """Reward: share of even tokens in the reply. Prompts have several lengths; one session is missing."""
        # The n-th batch is a function of n and the weights, as an engine's is with fixed seeds.
        self.sampled += 1
        torch.manual_seed(self.sampled)
        sequences = []
        v = self.version
        older = max(0, v - 1) if self.stale else v
        half = self.reply // 2
        for g in range(self.groups):
            prompt = torch.randint(0, VOCAB, (1, 3 + 4 * g), generator=self.generator).expand(self.size, -1)
            first, first_lp = sample(self.models[older], prompt, half)
            rest, rest_lp = sample(self.models[v], torch.cat([prompt, first], 1), self.reply - half)
            ids = torch.cat([prompt, first, rest], 1).tolist()
            logprobs = torch.cat([first_lp, rest_lp], 1).tolist()
            n = prompt.shape[1]
            for i in range(self.size):
                reward = float(np.mean([t % 2 == 0 for t in ids[i][n:]]))
                self.rewards.append(reward)
                missing = g == 0 and i == 0
                sequences.append(
                    Sequence(
                        token_ids=ids[i],
                        logprobs=[0.0] * n + logprobs[i],
                        versions=[-1] * n + [older] * half + [v] * (self.reply - half),
                        loss_mask=[False] * n + [True] * self.reply,
                        temperature=1.0,
                        reward=None if missing else reward,
                        session_id=f"{lease_id}-{g}-{i}",
                        group_id=f"{lease_id}-{g}",
                        task_id=f"task-{g}",
                    )
                )
        if self.corrupt:
            s = sequences[-1]
            s.logprobs[-1] += self.corrupt  # type: ignore[index]
        return Batch(lease_id, v, tuple(sequences))

    # weights

    async def probe(self, body: dict[str, Any]) -> web.StreamResponse:
        """What one engine samples, and of it the first logprob wrong by `corrupt_probe`."""
        replies = []
        for prompt in body["prompts"]:
            ids, logprobs = sample(self.models[self.version], torch.tensor([prompt]), body["max_tokens"])
            values = logprobs[0].tolist()
            values[0] += self.corrupt_probe
            replies.append(
                {
                    "engine": "engine-0",
                    "prompt_ids": prompt,
                    "token_ids": ids[0].tolist(),
                    "logprobs": values,
                    "versions": [self.version] * len(values),
                }
            )
        return web.json_response({"replies": replies})

    async def begin(self, body: dict[str, Any]) -> web.StreamResponse:
        from areal_gateway.worker_extension import WeightReceiver

        follows = body["force"] or body["version"] == self.version + (not self.needs_weights)
        if body["force"] and self.update is not None:  # its trainer was killed; the real one has a deadline
            self.drop()
        if self.update is not None or not follows:
            return self._error(409, "weights_conflict", f"version {body['version']} after {self.version}")
        self.receiver = self.receiver or WeightReceiver(worker_rank=0)
        group = tuple(body["store"].values())
        if body["backend"] == "disk":
            self.epoch += 1
            where = {"manifest": body["manifest"], "folder": body["store"]["folder"]}
            self.receiver.stage(epoch=self.epoch, version=body["version"], **where)
            return self._begun(body["version"], group, join=False)
        join = group != self.joined
        self.joined = None
        if join:
            self.epoch += 1
            self.receiver.join(
                epoch=self.epoch,
                store=body["store"],
                world_size=2,
                rank_offset=1,
                backend=body["backend"],
                timeout_s=10,
            )
        self.receiver.receive(
            epoch=self.epoch, version=body["version"], manifest=body["manifest"], timeout_s=10
        )
        return self._begun(body["version"], group, join=join)

    def _begun(self, version: int, group: tuple[Any, ...], *, join: bool) -> web.Response:
        self.update = {"id": f"u{len(self.calls)}", "version": version, "group": group}
        return web.json_response(
            {"update_id": self.update["id"], "epoch": self.epoch, "world_size": 2, "join": join}
        )

    async def commit(self, body: dict[str, Any]) -> web.StreamResponse:
        update = self.update
        if update is None or update["id"] != body["update_id"]:
            return self._error(409, "weights_retry", "no such update")
        if self.fail_commits:
            self.fail_commits -= 1
            self.drop()
            return self._error(409, "weights_retry", "engine-0: the test broke it")
        end = time.monotonic() + 10
        while (status := self.receiver.status())["phase"] != "received":
            if status["phase"] == "failed" or time.monotonic() > end:
                self.drop()
                return self._error(409, "weights_retry", f"not received: {status}")
            await asyncio.sleep(0.01)
        if status["checksums"] != body["checksums"]:
            self.drop()
            return self._error(409, "weights_retry", "checksums differ")
        adapter = self.receiver.staged.adapter
        model = copy.deepcopy(self.models[0 if adapter else self.version])
        given: set[str] = set()

        def add(tensors: Any) -> None:
            """An adapter, by its definition; peft's names in, those of the model it is added to out."""
            parameters, given = dict(model.named_parameters()), dict(tensors)
            for name, a in given.items():
                if name.endswith(".lora_A.weight"):
                    module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    b = given[name.replace("lora_A", "lora_B")]
                    with torch.no_grad():
                        parameters[f"{module}.weight"] += adapter.alpha / adapter.rank * (b @ a)

        def load(tensors: Any) -> None:
            parameters = dict(model.named_parameters())
            for name, tensor in tensors:
                with torch.no_grad():
                    parameters[name].copy_(tensor)
                given.add(name)
            assert given == set(parameters), given ^ set(parameters)

        answer = self.receiver.load(update["version"], add if adapter else load)
        if "error" in answer:
            return self._error(409, "weights_held", answer["error"])
        self.version, self.joined, self.update = update["version"], update["group"], None
        self.models[self.version], self.needs_weights = model, False
        return web.json_response(
            {"version": self.version, "pause_s": 0.01, "receive_s": 0.01, "load_s": 0.01, "engines": 1}
        )

    async def abort(self, body: dict[str, Any]) -> web.StreamResponse:
        if self.update is not None and self.update["id"] == body["update_id"]:
            self.drop()
        return web.json_response({"version": self.version})

    def drop(self) -> None:
        self.receiver.abort()
        self.update = None
