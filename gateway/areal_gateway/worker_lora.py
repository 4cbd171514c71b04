"""Runs inside the engine: a LoRA adapter's content replaced in place, without a file and without a new name.

Invariant: the engine holds one adapter, and its id stays; requests that name it, those in flight included,
go on with the new content. The caller has paused the engine, which empties its caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from areal_agent.weights import Adapter


def refuse_whole_weights(model_runner: Any) -> None:
    """Raise ValueError where an adapter would stay on top of the new weights, which have it merged."""
    if getattr(model_runner, "lora_manager", None) is not None:
        raise ValueError(
            "this engine was started with --enable-lora and is sent whole weights; start it without, or set "
            "weights.adapter: adapter"
        )


def replace_adapter(model_runner: Any, adapter: Adapter, tensors: Iterable[tuple[str, Any]]) -> None:
    """Give the runner's one adapter the A and B in `tensors` (peft's names).

    Raises ValueError when the engine cannot hold it, or would leave a part of it out. Before the adapter is
    replaced, except for the latter.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    worker_manager: Any = getattr(model_runner, "lora_manager", None)
    held = sorted(worker_manager.list_adapters()) if worker_manager is not None else []
    if worker_manager is None or len(held) != 1:
        raise ValueError(
            f"this engine holds {len(held)} LoRA adapters, where one is replaced; start it with --enable-lora and "
            "--lora-modules policy=FOLDER, or set weights.adapter: merged"
        )
    manager, config = worker_manager._adapter_manager, worker_manager.lora_config
    helper = PEFTHelper(adapter.rank, adapter.alpha, list(adapter.target_modules))  # pyright: ignore[reportArgumentType]
    helper.validate_legal(config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    new = LoRAModel.from_lora_tensors(
        held[0],
        {name: tensor.clone() for name, tensor in tensors},  # it outlives the staging these are views of
        helper,
        device="cpu",
        dtype=config.lora_dtype,
        model_vocab_size=worker_manager.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )
    manager.remove_adapter(new.id)
    manager.add_adapter(new)  # fuses what the engine fuses (q/k/v, gate/up)
    manager.activate_adapter(new.id)
    if unused := sorted(set(new.loras) - set(manager.modules)):
        raise ValueError(f"this engine applies no adapter to {unused[0]} ({len(unused)} such layers)")
