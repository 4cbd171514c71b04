"""A model folder with a byte-level tokenizer of Qwen3's special tokens: all that the gateway reads of one."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_gateway.tokens import QWEN3_TOKENS


def build_folder(folder: Path) -> Path:
    words = [*QWEN3_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tok = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(list(QWEN3_TOKENS))
    hf = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    hf.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 4096}')
    (folder / "model.safetensors").write_bytes(b"")  # its fake engine has no use for weights
    return folder
