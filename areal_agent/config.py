"""Every setting of a run: one home, one default, one sentence of help each.

The controller resolves it once (code, then `areal.yaml`, then defaults), writes it to
`RUN_DIR/config.json`, and every other process of the run reads that file. Secrets are never in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_agent.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())


class SamplingConfig(Section):
    """How the policy is sampled while training; pinned at the gateway whatever the agent asks for."""

    temperature: float = Field(default=1.0, gt=0, description="softmax temperature of training rollouts")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass kept")
    top_k: int = Field(default=0, ge=0, description="candidates kept; 0 keeps all")
    max_tokens: int | None = Field(default=None, gt=0, description="most tokens a single reply may have")
    seed: int | None = Field(default=None, description="makes sampling repeatable per session and call")


class RolloutConfig(Section):
    """Groups of sessions, and how far generation may run ahead."""

    groups_per_step: int = Field(default=16, gt=0, description="tasks (groups) in one training batch")
    group_size: int = Field(default=8, gt=0, description="sessions of one task that are compared")
    max_staleness: int = Field(
        default=1, ge=0, description="η: most versions a trained token may lag; 0 is synchronous"
    )
    concurrency: int = Field(
        default=128, gt=0, description="most sessions running at once, their rewards included"
    )
    session_timeout_s: float = Field(
        default=300.0, gt=0, description="a session running longer is sealed, reward missing"
    )
    reward_timeout_s: float = Field(
        default=60.0, gt=0, description="a reward taking longer (once started) is missing"
    )
    max_failures: int = Field(
        default=32, ge=0, description="consecutive sessions that may fail before the run stops and says why"
    )
    seed: int = Field(default=0, description="order of the tasks")


class EvalConfig(Section):
    """Held-out evaluation, greedy."""

    tasks: int = Field(default=200, ge=0, description="held-out tasks scored before and after training")
    every: int = Field(default=10, ge=0, description="steps between evaluations during training; 0: never")
    tasks_during: int = Field(default=64, gt=0, description="held-out tasks scored by those")
    concurrency: int = Field(default=64, gt=0, description="most evaluation sessions running at once")


class TrainerConfig(Section):
    """The decoupled-PPO step and the ranks that take it."""

    steps: int = Field(default=40, gt=0, description="optimiser steps (= versions) to train for")
    ranks: int = Field(default=1, gt=0, description="FSDP2 ranks, started by torchrun")
    platform: Literal["auto", "cpu", "cuda", "npu"] = Field(default="auto", description="device family")
    learning_rate: float = Field(default=3e-4, gt=0, description="AdamW peak learning rate")
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up steps")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW moments")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW decoupled decay")
    grad_clip: float = Field(default=1.0, gt=0, description="largest global gradient norm")
    clip_low: float = Field(default=0.2, gt=0, description="PPO clip: ratio at least 1 - this")
    clip_high: float = Field(default=0.28, gt=0, description="PPO clip: ratio at most 1 + this")
    behaviour_weight_cap: float = Field(
        default=2.0,
        gt=0,
        description="truncation of the behaviour weight π_prox/π_behave in the decoupled loss",
    )
    minibatches: int = Field(
        default=1, gt=0, description="optimiser updates a batch is cut into; one version for all"
    )
    advantage_std: bool = Field(
        default=True, description="divide group-centred rewards by the group's deviation (GRPO)"
    )
    microbatch_tokens: int = Field(default=8192, gt=0, description="most tokens in one packed forward")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="forward and backward dtype"
    )
    logprob_gap_bound: float = Field(
        default=1e-2,
        gt=0,
        description="stop when engine and trainer logprobs of the same weights differ by more",
    )
    lease_s: float = Field(default=600.0, gt=0, description="a leased batch returns unless acked within this")
    wait_s: float = Field(default=600.0, gt=0, description="stop when no batch became ready for this long")
    checkpoint_every: int = Field(
        default=10, ge=0, description="steps between checkpoints, the last two are kept; 0: only at the end"
    )
    seed: int = Field(default=0, description="seed of every rank")


class FleetConfig(Section):
    """The engines."""

    engines: int | Literal["auto"] = Field(
        default="auto", description="engines to start; auto: two where memory allows"
    )
    attach: list[str] = Field(default_factory=list, description="URLs of engines somebody else runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="engine compute dtype"
    )
    max_model_len: int | None = Field(default=None, gt=0, description="context length; None: the model's own")
    max_num_seqs: int = Field(default=64, gt=0, description="calls one engine decodes at once")
    kv_cache_gib: float = Field(default=1.0, gt=0, description="KV cache of a CPU engine")
    memory_gib: float = Field(
        default=3.5, gt=0, description="memory one engine is counted with when deciding how many"
    )
    tensor_parallel: int = Field(default=1, gt=0, description="ranks of one engine")
    stream_interval: int = Field(default=8, gt=0, description="tokens per streamed event from the engine")
    extra_args: list[str] = Field(default_factory=list, description="further arguments of the vLLM server")
    start_timeout_s: float = Field(default=240.0, gt=0, description="an engine not ready by then has failed")
    call_timeout_s: float = Field(default=300.0, gt=0, description="longest a single call may take")
    probe_s: float = Field(default=2.0, gt=0, description="seconds between health probes")
    max_restarts: int = Field(default=3, ge=0, description="restarts of an engine before it stays out")


class WeightsConfig(Section):
    """The weight transaction: trainer to engines."""

    transport: Literal["collective"] = Field(
        default="collective", description="packed broadcast into the engines"
    )
    backend: Literal["auto", "gloo", "nccl", "hccl"] = Field(default="auto", description="collective backend")
    bucket_mib: float = Field(default=64.0, gt=0, description="most MiB in one broadcast")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="wire dtype; auto: fleet.dtype, float32 where that is auto too"
    )
    join_timeout_s: float = Field(default=30.0, gt=0, description="deadline for a new epoch's group")
    transfer_timeout_s: float = Field(default=60.0, gt=0, description="deadline for all buckets")
    pause_timeout_s: float = Field(
        default=30.0, gt=0, description="deadline for an engine to pause, load or resume"
    )
    retries: int = Field(default=2, ge=0, description="new epochs tried before the update has failed")


class GatewayConfig(Section):
    """The observer's own server."""

    host: str = Field(default="127.0.0.1", description="address to bind; loopback unless you mean it")
    port: int = Field(default=0, ge=0, le=65535, description="port to bind; 0 picks a free one")
    allow_remote: bool = Field(
        default=False, description="permit binding an address that is not loopback, without TLS"
    )
    max_body_mib: float = Field(default=64.0, gt=0, description="largest request body, after decompression")
    renderer: str = Field(
        default="auto", description="message renderer; auto: by the model, else its chat template"
    )
    enable_thinking: bool = Field(
        default=False, description="chat template's thinking switch, where it has one"
    )
    ledger_sync: Literal["normal", "full"] = Field(
        default="normal",
        description="normal: a call survives kill -9; full: a power cut too, at one disk flush (milliseconds) a commit",
    )
    hold_timeout_s: float = Field(
        default=120.0, gt=0, description="longest a call waits while no engine serves, then 503"
    )


class RunConfig(Section):
    """A whole run."""

    model: str = Field(default="", description="Hugging Face model folder the policy starts from")
    run_dir: str = Field(default="", description="folder of this run; empty: runs/NAME-TIME")
    name: str = Field(default="run", description="name of the run, for its folder")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "config") -> RunConfig:
        """Validate; a ConfigError names each wrong setting, its value and what is allowed."""
        try:
            return cls.model_validate(values)
        except ValidationError as e:
            lines = []
            for err in e.errors():
                where = ".".join(map(str, err["loc"])) or "(top level)"
                if err["type"] == "extra_forbidden":
                    lines.append(f"{where}: no such setting; `areal-agent config` lists them all")
                else:
                    lines.append(f"{where} = {err['input']!r}: {err['msg'][0].lower()}{err['msg'][1:]}")
            raise ConfigError(f"{source}: " + "; ".join(lines)) from None

    @classmethod
    def read(cls, path: str | Path) -> RunConfig:
        """A YAML or JSON file -> config. Raises ConfigError."""
        return cls.parse(read_mapping(path), str(path))


def read_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML (or JSON) file that holds one mapping. Raises ConfigError."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(f"cannot read {path}: {e}") from e
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; it must be a mapping of settings")
    return values


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings merged, `over` wins; neither argument is changed."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out
