"""Every setting of a run: one home, one default, one sentence of help each.

The controller resolves it once (code, then `areal.yaml`, then defaults), writes it to
`RUN_DIR/config.json`, and every other process of the run reads that file. Secrets are never in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from areal_agent.algorithm import AlgorithmConfig
from areal_agent.errors import ConfigError
from areal_agent.section import Section


class SamplingConfig(Section):
    """How the policy is sampled while training; pinned at the gateway, unless the agent may choose."""

    temperature: float = Field(default=1.0, gt=0, description="softmax temperature of training rollouts")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass kept")
    top_k: int = Field(default=0, ge=0, description="candidates kept; 0 keeps all")
    max_tokens: int | None = Field(default=None, gt=0, description="most tokens a single reply may have")
    seed: int | None = Field(default=None, description="makes sampling repeatable per session and call")
    pinned: bool = Field(
        default=True,
        description="this holds, whatever a call asks. false: a call's own temperature, top_p and top_k hold, save in "
        "evaluation; one that is greedy or cuts the distribution is context, never trained",
    )


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
    idle_timeout_s: float | None = Field(
        default=None, gt=0, description="a session without a call for this long is sealed; None: never"
    )
    train_labels: dict[str, list[str]] = Field(
        default_factory=dict,
        description="label -> values: only calls that carry one of them are trained, others are context; empty: all",
    )


class RewardsConfig(Section):
    """What several rewards of one session come to."""

    rule: Literal["last", "sum"] = Field(
        default="last", description="of rewards under different keys: the last one counts, or their sum"
    )
    turn_discount: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="what a call gets of the returns of the calls that continue it, along the tree; in batches and "
        "exports (`call_returns`), while the recipes compare whole sessions",
    )


class OnlineConfig(Section):
    """Somebody else's service as the agent: one project key, sessions found by header or conversation."""

    enabled: bool = Field(
        default=False, description="accept calls under RUN_DIR/project.key, and train on them"
    )
    idle_timeout_s: float = Field(
        default=600.0, gt=0, description="an online session without a call for this long is sealed"
    )
    deadline_s: float = Field(
        default=86400.0,
        gt=0,
        description="an online session is sealed this long after it began, at the latest",
    )
    close_on_reward: bool = Field(
        default=True, description="a reward of the whole session seals it; one of a single reply never does"
    )


class EvalConfig(Section):
    """Held-out evaluation, greedy."""

    tasks: int = Field(default=200, ge=0, description="held-out tasks scored before and after training")
    every: int = Field(default=10, ge=0, description="steps between evaluations during training; 0: never")
    tasks_during: int = Field(default=64, gt=0, description="held-out tasks scored by those")
    concurrency: int = Field(default=64, gt=0, description="most evaluation sessions running at once")


class LoRAConfig(Section):
    """Low-rank adapters on linear layers, which alone are trained: W + alpha/rank · B·A (arXiv:2106.09685).

    There is no dropout: the trainer's logprobs have to be the engine's.
    """

    rank: int = Field(
        default=0, ge=0, le=512, description="of A and B, which alone are trained; 0: all weights are trained"
    )
    alpha: float = Field(default=32.0, gt=0, description="B·A counts times alpha / rank")
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="names (or their ends) of the adapted linear layers; all-linear: all but the output head",
    )


class TrainerConfig(Section):
    """The optimiser, the ranks that run it, and the run's bounds. What is optimised: `algorithm`."""

    steps: int = Field(default=40, gt=0, description="optimiser steps (= versions) to train for")
    ranks: int = Field(default=1, gt=0, description="FSDP2 ranks, started by torchrun")
    sequence_parallel: int = Field(
        default=1, gt=0, description="ranks that share each packed row (Ulysses); divides ranks and heads"
    )
    platform: Literal["auto", "cpu", "cuda", "npu"] = Field(default="auto", description="device family")
    learning_rate: float = Field(default=3e-4, gt=0, description="AdamW peak learning rate")
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up steps")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after the warm-up, over the rest of the steps"
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="where linear and cosine end, as a share of the peak"
    )
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW moments")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW decoupled decay")
    grad_clip: float = Field(default=1.0, gt=0, description="largest global gradient norm")
    minibatches: int = Field(
        default=1, gt=0, description="optimiser updates a batch is cut into; one version for all"
    )
    microbatch_tokens: int = Field(default=8192, gt=0, description="most tokens in one packed forward")
    share_prefixes: bool = Field(
        default=True,
        description="compute what sequences of a micro-batch have in common at their beginning once; it does not show "
        "in the gradient",
    )
    activation_checkpointing: bool = Field(
        default=False, description="keep only each layer's input and compute the layer again in backward"
    )
    cpu_offload: bool = Field(
        default=False,
        description="keep weights, gradients and AdamW's moments in host memory and step there: less device memory, "
        "slower steps; an error on cpu, whose memory is the host's",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="forward and backward dtype"
    )
    logprob_gap_bound: float = Field(
        default=1e-2,
        gt=0,
        description="stop when engine and trainer logprobs of the same weights differ by more",
    )
    lease_s: float = Field(
        default=600.0,
        gt=0,
        description="a leased batch returns when its trainer was not heard of for this long",
    )
    wait_s: float = Field(
        default=600.0, gt=0, description="stop when no batch became ready for this long; online: no limit"
    )
    checkpoint_every: int = Field(
        default=10, ge=0, description="steps between checkpoints; 0: only at the end"
    )
    keep_checkpoints: int = Field(default=2, gt=0, description="newest checkpoints kept")
    seed: int = Field(default=0, description="seed of every rank")
    lora: LoRAConfig = Field(default_factory=LoRAConfig)

    @field_validator("sequence_parallel")
    @classmethod
    def _divides_ranks(cls, value: int, info: ValidationInfo) -> int:
        if (ranks := info.data.get("ranks", value)) % value:
            raise ValueError(f"does not divide trainer.ranks = {ranks}")
        return value


class FleetConfig(Section):
    """The engines."""

    engines: int | Literal["auto"] = Field(
        default="auto", description="engines to start; auto: two where memory allows"
    )
    attach: list[str] = Field(default_factory=list, description="URLs of engines somebody else runs")
    driver: Literal["auto", "spans", "resubmit"] = Field(
        default="auto",
        description="how replies outlive an update: spans in vLLM from 0.32 on, resubmit before; auto: as the server can",
    )
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

    transport: Literal["collective", "disk"] = Field(
        default="collective",
        description="collective: packed broadcast into the engines; disk: files in a folder that all see",
    )
    adapter: Literal["merged", "adapter"] = Field(
        default="merged",
        description="with trainer.lora: whole weights with the adapter merged, for any engine; or the adapter alone",
    )
    folder: str = Field(default="", description="disk: where versions are written; empty: RUN_DIR/weights")
    keep: int = Field(default=2, ge=1, description="disk: versions kept; one being read is kept in any case")
    backend: Literal["auto", "gloo", "nccl", "hccl"] = Field(default="auto", description="collective backend")
    bucket_mib: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto",
        description="most MiB in one broadcast or file; auto: 4 between CPUs, whose caches then hold it, else 32; 64 a file",
    )
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
    tls_cert: str = Field(
        default="", description="PEM certificate chain; with it and tls_key the gateway speaks https"
    )
    tls_key: str = Field(default="", description="PEM private key of tls_cert")
    max_body_mib: float = Field(default=64.0, gt=0, description="largest request body, after decompression")
    renderer: str = Field(
        default="auto", description="message renderer; auto: by the model, else its chat template"
    )
    enable_thinking: bool = Field(
        default=False, description="chat template's thinking switch, where it has one"
    )
    constrain: bool = Field(
        default=True,
        description="let a JSON response format and a forced tool constrain the sampling; such calls are context, "
        "never trained. false: they have no effect, are named in x-areal-ignored, and the calls are trained",
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
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    online: OnlineConfig = Field(default_factory=OnlineConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)

    @property
    def served_adapter(self) -> LoRAConfig | None:
        """The adapter that engines hold apart from the model; None where they are given whole weights.

        Raises ConfigError where one is wanted and none is trained.
        """
        if self.weights.adapter == "merged":
            return None
        if not self.trainer.lora.rank:
            raise ConfigError(
                "weights.adapter = adapter sends a LoRA adapter alone, but trainer.lora.rank = 0 trains none; set "
                "it, or leave weights.adapter merged"
            )
        return self.trainer.lora

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
