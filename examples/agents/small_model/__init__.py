"""The model that the examples start from: a small Qwen3 made here, from nothing, in about a minute.

`build()` is all that an example needs. The work runs in a process of its own, so that whoever calls it
carries no torch; its result is kept under a name made of everything it depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from areal_agent.errors import ArealError

HERE = Path(__file__).resolve().parent
DEPENDENCIES = ("tokenizers", "transformers", "torch", "renderers")


def cache_folder() -> Path:
    """`AREAL_CACHE`, else `.cache` of the checkout."""
    return Path(os.environ.get("AREAL_CACHE") or HERE.parents[2] / ".cache")


def fingerprint(seed: int) -> str:
    """Content hash: the recipe's own sources, the agent's tool, the seed, and the libraries' versions."""
    digest = hashlib.blake2b(digest_size=6)
    for source in (*sorted(HERE.glob("*.py")), HERE.parent / "calculator.py"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(" ".join([str(seed), *(f"{name}={version(name)}" for name in DEPENDENCIES)]).encode())
    return digest.hexdigest()


def build(seed: int = 2) -> Path:
    """Folder of the warm-started model; made once, then reused. Raises ArealError when making it fails."""
    folder = cache_folder() / f"small_model-{fingerprint(seed)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits for the first one's model
        if not (folder / "config.json").is_file():
            command = [sys.executable, "-m", "small_model", str(folder), "--seed", str(seed)]
            code = subprocess.run(command, cwd=HERE.parent, check=False).returncode
            if code != 0:
                raise ArealError(f"making the starting model failed with code {code}; its reason is above")
    return folder
