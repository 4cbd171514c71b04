"""A Hugging Face causal LM as an FSDP2 policy: packed tokens in, logprobs of predicted tokens out.

Master weights are float32 and stay sharded; a layer is gathered in the compute dtype while it runs.
Dropout is off always: the trainer's logprobs have to be the engine's.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal_agent.errors import ConfigError
from areal_trainers import attention
from areal_trainers.logprobs import head_logprobs, token_logprobs
from areal_trainers.packing import MicroBatch
from areal_trainers.ulysses import SequenceGroup, check_heads

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings by which a model changes logits after its output head; such a model computes them itself."""


def load_causal_lm(folder: str | Path) -> PreTrainedModel:
    """The model in `folder`, float32, with packed attention. Raises ConfigError with the reason."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        what = "holds no config.json" if path.is_dir() else "is not a folder"
        raise ConfigError(f"model folder {path} {what}; give one that `save_pretrained` has written")
    try:
        attention.check_supported(AutoConfig.from_pretrained(path, local_files_only=True))
        model = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=torch.float32, attn_implementation=attention.NAME
        )
    except ConfigError:
        raise
    except Exception as e:  # transformers raises a dozen kinds here; each means the folder is unusable
        raise ConfigError(
            f"cannot load a causal LM from {path}: {type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else e!r}; "
            "check that its config.json and safetensors files belong together"
        ) from e
    return model.eval()


class Policy(nn.Module):
    """Root FSDP module around a causal LM. `policy(micro)` -> ([N] logprobs, [N] entropies), nats.

    Keeping the output head inside this forward lets the root hold its weight gathered while chunks of
    it run, and lets only predicted rows reach it.

    Args:
        kernel: a name of attention.KERNELS.
        sequence: ranks that share every packed row (then all of them get the whole row's results).
    """

    def __init__(
        self, lm: PreTrainedModel, kernel: str = "sdpa", sequence: SequenceGroup | None = None
    ) -> None:
        super().__init__()
        self.lm, self.kernel, self.sequence = lm, kernel, sequence
        head = lm.get_output_embeddings()
        transformed = any(getattr(lm.config, name, None) for name in LOGIT_TRANSFORMS)
        self.own_logits = transformed or type(head) is not nn.Linear

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sequence is None:
            return self._results(micro, micro)
        part, owner = self.sequence.cut(micro)
        logprobs, entropies = self.sequence.gather(torch.stack(self._results(micro, part)), owner)
        return logprobs.clone(), entropies.clone()  # FSDP hooks the backward on what is returned; no views

    def _results(self, whole: MicroBatch, part: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies of the tokens that `part`, a slice of the row `whole`, predicts."""
        inputs = packed_inputs(whole, part, self.kernel, self.sequence)
        if self.own_logits:
            logits = self.lm(**inputs, logits_to_keep=part.predict).logits[0]
            return token_logprobs(logits, part.labels, part.temperatures)
        hidden = self.lm.base_model(**inputs).last_hidden_state[0].index_select(0, part.predict)
        head = self.lm.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head_logprobs(hidden, head.weight, head.bias, part.labels, part.temperatures)


def packed_inputs(
    whole: MicroBatch, part: MicroBatch, kernel: str, sequence: SequenceGroup | None
) -> dict[str, Any]:
    """What a transformers model is called with for `part`, this rank's slice of the packed row `whole`."""
    return dict(
        input_ids=part.token_ids,
        position_ids=part.position_ids,
        areal_plan=attention.Plan(whole.layout, kernel, sequence),
        use_cache=False,
    )


def shard(
    lm: PreTrainedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype = torch.float32,
    *,
    kernel: str = "sdpa",
    sequence: SequenceGroup | None = None,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
) -> Policy:
    """Shard `lm` over `mesh`, one FSDP unit per decoder layer and one for the rest.

    Gradients are reduced in the masters' dtype and averaged over ranks (FSDP's way): a loss summed over ranks has
    to be multiplied by their number. `kernel` is the platform's attention, taken where the compute dtype
    allows. With `activation_checkpointing` a layer keeps its input alone and runs again in backward. With
    `cpu_offload` shards, their gradients and so the optimiser's state are in host memory.
    """
    if sequence is not None:
        check_heads(lm.config, sequence.size)
    policy = Policy(lm, attention.choose_kernel(kernel, compute_dtype), sequence)
    fully_shard_over(policy, lm, mesh, compute_dtype, activation_checkpointing, cpu_offload)
    return policy


def fully_shard_over(
    root: nn.Module,
    lm: PreTrainedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
) -> None:
    """Shard `root`, which is made of `lm`: one FSDP unit per decoder layer of `lm`, and one for the rest."""
    # With offloading the whole float32 model need not fit on the device: FSDP takes one unit there at a time.
    if not cpu_offload:
        root.to(mesh.device_type)
    # Only memory that a device of its own reads from can be pinned.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    precision = MixedPrecisionPolicy() if compute_dtype == torch.float32 else mixed
    for layer in decoder_layers(lm):
        if activation_checkpointing:
            # Under FSDP's hooks, which sit around __call__, and without a wrapper that would rename weights.
            # There is no dropout, so no random state to restore.
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(root, mesh=mesh, mp_policy=precision, offload_policy=offload)


def decoder_layers(lm: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as the model's own `_no_split_modules` names them."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    layers = [m for m in lm.modules() if type(m).__name__ in names]
    if not layers:
        raise ConfigError(f"{type(lm).__name__} names no decoder layer to shard (`_no_split_modules`)")
    return layers
