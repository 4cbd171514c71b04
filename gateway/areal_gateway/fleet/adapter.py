"""The LoRA adapter that engines begin with: one that changes nothing, until the trainer's first arrives.

Invariant: from their first token on engines sample through one adapter of one name (`MODEL_NAME`), whose
content alone changes; so a request never has to say which version of it is meant.

vLLM makes an adapter known by a folder in peft's format and takes none that is empty, so this one holds a
single layer, with A = B = 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from areal_agent.config import LoRAConfig
from areal_agent.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for (`--max-lora-rank`)."""


@dataclass(frozen=True)
class EngineAdapter:
    """folder: what an engine starts with, in peft's format; room: the rank it makes room for."""

    folder: Path
    room: int


def write_first_adapter(folder: Path, model: Path, lora: LoRAConfig) -> EngineAdapter:
    """Write it to `folder` for the Hugging Face model folder `model`. Raises ConfigError."""
    name, (rows, columns) = _some_layer(model)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            f"base_model.model.{name}.lora_A.weight": np.zeros((lora.rank, columns), np.float32),
            f"base_model.model.{name}.lora_B.weight": np.zeros((rows, lora.rank), np.float32),
        },
        folder / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [name.rpartition(".")[2]],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return EngineAdapter(folder, next(r for r in RANKS if r >= lora.rank))


def _some_layer(model: Path) -> tuple[str, tuple[int, int]]:
    """(name, [out, in]) of an attention projection of the model."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (it is no mapping)
                if ".layers." in key and key.endswith("_proj.weight"):
                    shape = tensors.get_slice(key).get_shape()
                    if len(shape) == 2:
                        return key.removesuffix(".weight"), (shape[0], shape[1])
    raise ConfigError(
        f"weights.adapter = adapter: the model folder {model} names no linear layer `*_proj` that an engine could "
        "serve an adapter for; leave weights.adapter merged"
    )
