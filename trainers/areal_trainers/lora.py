"""LoRA through peft: the model's own weights frozen, low-rank adapters beside its linear layers trained.

Invariant: what engines, exports and checkpoints are given under the model's own names is W + s·B·A, made one
tensor at a time when it is asked for; W itself is never written to. s = alpha / rank (arXiv:2106.09685, §4.1).

peft replaces linear layers inside the model, which stays the class it was; there is no wrapper around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoRALinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from areal_agent.config import LoRAConfig
from areal_agent.errors import ConfigError
from areal_agent.weights import Adapter
from areal_trainers.buckets import whole

NAME = "default"
"""peft's name of the adapter within the model; it is in parameter names, and in no file."""

PREFIX = "base_model.model."
"""What peft's files, and so vLLM, put before a module's name."""


def attach(lm: PreTrainedModel, config: LoRAConfig, seed: int) -> PreTrainedModel:
    """Freeze `lm` and give it an adapter, in place, before it is sharded; returns it.

    A is drawn from `seed` alone, the same on every rank; B is 0, so the policy is the model's at first.
    Raises ConfigError for layers that are not there or whose adapter could not be merged.
    """
    targets = config.target_modules
    if not targets:
        raise ConfigError("trainer.lora.target_modules is empty; name linear layers, or leave it all-linear")
    wanted = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  (a float does)
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(wanted, lm, adapter_name=NAME)
        except ValueError as e:
            raise ConfigError(f"trainer.lora.target_modules = {targets!r}: {e}") from e
    ends = (lm.get_input_embeddings(), lm.get_output_embeddings())
    for name, module in lm.named_modules():
        if isinstance(module, BaseTunerLayer) and (type(module) is not LoRALinear or module in ends):
            raise ConfigError(
                f"trainer.lora.target_modules = {targets!r} takes in {name}, a {type(module.get_base_layer()).__name__}; "
                "only linear layers within the decoder can be adapted"
            )
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return lm.eval()


def adapted(lm: nn.Module) -> dict[str, LoRALinear]:
    """Name -> layer, of the layers that have an adapter; none where LoRA is off."""
    return {name: m for name, m in lm.named_modules() if isinstance(m, LoRALinear)}


def describe(lm: nn.Module) -> Adapter | None:
    """Rank, alpha and adapted layers; None where LoRA is off."""
    layers = adapted(lm)
    if not layers:
        return None
    first = next(iter(layers.values()))
    targets = tuple(sorted({name.rpartition(".")[2] for name in layers}))
    return Adapter(rank=first.r[NAME], alpha=first.lora_alpha[NAME], target_modules=targets)


def adapter_tensors(lm: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(peft's name, possibly sharded tensor) of every A [rank, in] and B [out, rank]."""
    return [
        (PREFIX + name.replace(f".{NAME}.", "."), p.detach())
        for name, p in lm.named_parameters()
        if ".lora_" in name
    ]


@dataclass(frozen=True)
class Merged:
    """W + s·B·A, [out, in], not made yet. W, B and A may be FSDP shards."""

    base: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def whole(self) -> torch.Tensor:
        """A new tensor in W's dtype. A collective where anything is sharded."""
        base, a, b = whole(self.base), whole(self.a), whole(self.b)
        gathered = base.untyped_storage().data_ptr() != _local(self.base).untyped_storage().data_ptr()
        # A gathered copy is ours to write to; so only one tensor of this size exists besides the shards.
        return torch.addmm(base, b, a, alpha=self.scaling, out=base if gathered else None)


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value  # pyright: ignore[reportAttributeAccessIssue]


def merged(
    lm: nn.Module, tensors: Sequence[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor | Merged]]:
    """`tensors` of `lm` by the names they have without an adapter, those of adapted layers merged."""
    layers = adapted(lm)
    if not layers:
        return list(tensors)
    named = dict(tensors)
    out: list[tuple[str, torch.Tensor | Merged]] = []
    for name, value in tensors:
        module, _, leaf = name.rpartition(".base_layer.")
        if module in layers and leaf == "weight":
            a, b = (named[f"{module}.lora_{side}.{NAME}.weight"] for side in "AB")
            out.append((f"{module}.weight", Merged(value, a, b, layers[module].scaling[NAME])))
        elif ".lora_" not in name:
            out.append((f"{module}.{leaf}" if module in layers else name, value))
    return out


@contextmanager
def without_adapter(lm: nn.Module) -> Iterator[None]:
    """Inside, forwards are those of the frozen model."""
    layers = adapted(lm).values()
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


def write_adapter_config(folder: Path, adapter: Adapter, model: str) -> None:
    """adapter_config.json, as `peft.PeftModel.from_pretrained` and vLLM read it. model: folder of what it adapts."""
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=list(adapter.target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model,
        inference_mode=True,
    )
    values = config.to_dict()
    values["target_modules"] = sorted(adapter.target_modules)
    (folder / "adapter_config.json").write_text(json.dumps(values, indent=2, default=str) + "\n")
