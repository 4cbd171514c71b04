"""The trainer's compute: output head, packing, common beginnings, sequence parallelism, where a step's seconds go.

Every variant runs in a process of its own, one after the other; targets compare them within this run.
Memory is peak resident memory above what the process held before the measured work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _face import Report, main

from areal_agent.config import RunConfig
from areal_agent.rundir import RunDir
from areal_trainers.clock import PHASES

HERE = Path(__file__).parent
SMALL, LARGE = 49_152, 151_936
"""Vocabularies of SmolLM2 and Qwen3."""
TOKENS = 4096


def measure(quick: bool) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        model = quick_start_model(Path(scratch))
        head(report, SMALL, TOKENS, 1 if quick else 3, held=True)
        head(report, LARGE, TOKENS // 4 if quick else TOKENS, 1, held=False)
        packing(report, model, 96 if quick else 256, 1 if quick else 3)
        beginnings(report, model, quick)
        sequence(report, TOKENS // 4 if quick else TOKENS)
        profile(report, model, Path(scratch) / "run", 3 if quick else 6)
    return report


def head(report: Report, vocabulary: int, tokens: int, repeats: int, *, held: bool) -> None:
    naive, fused = (part("head", kind, vocabulary, tokens, repeats) for kind in ("naive", "fused"))
    memory, seconds = fused["MiB"] / naive["MiB"], fused["s"] / naive["s"]
    what = f"head {tokens} x {vocabulary} x 576"
    row(report, what, "naive", naive, 1.0, 1.0)
    row(report, what, "fused", fused, memory, seconds)
    if held:
        report.target(f"{what}: {memory:.3f} of the naive memory (at most 0.20)", memory <= 0.20)
        report.target(f"{what}: {seconds:.2f} of the naive time (at most 1.3)", seconds <= 1.3)


def packing(report: Report, model: Path, count: int, repeats: int) -> None:
    budget = 8192
    kinds = ("padded", "sorted", "packed")
    padded, by_length, packed = (part("rows", kind, str(model), budget, count, repeats) for kind in kinds)
    what = f"{count} sequences, log-normal σ = 1"
    for kind, of in zip(kinds, (padded, by_length, packed), strict=True):
        row(report, what, kind, of, of["MiB"] / padded["MiB"], of["s"] / padded["s"])
        report.rows[-1] |= {"valid tokens/s": of["valid"] / of["s"], "valid": of["valid"] / of["computed"]}
    gain = padded["s"] / packed["s"]
    report.target(f"{what}: packed {gain:.2f} x the valid tokens/s of padded (at least 1.8)", gain >= 1.8)
    off = abs(packed["norm"] / padded["norm"] - 1)
    report.target(f"{what}: packed and padded gradients have the same norm to {off:.1e} (1e-4)", off <= 1e-4)


BEGINNINGS = (
    ("siblings", "small", 8, "8 x 8 siblings"),
    ("branches", "small", 8, "8 sessions of 5 branches"),
    ("strangers", "small", 48, "48 that share nothing"),
    ("siblings", "wide", 2, "2 x 8 siblings, width 576"),
    ("branches", "wide", 3, "3 sessions, width 576"),
)
"""(shape, model, how many, what the report calls it): _trainer_part.py says what they are."""


def beginnings(report: Report, model: Path, quick: bool) -> None:
    """The quick start's model, and four layers of SmolLM2-135M's width."""
    for shape, width, count, what in BEGINNINGS[: 3 if quick else None]:
        count = max(2, count // 8) if quick else count
        apart, shared = (
            part(
                "prefixes", shape, kind, str(model), count, 8192, width, 1 if width == "wide" or quick else 3
            )
            for kind in ("apart", "shared")
        )
        for kind, of in (("apart", apart), ("shared", shared)):
            row(report, what, kind, of, of["MiB"] / apart["MiB"], of["s"] / apart["s"])
            report.rows[-1] |= {"tokens": of["tokens"], "of  ": of["tokens"] / apart["tokens"]}
        off = abs(shared["norm"] / apart["norm"] - 1)
        report.target(f"{what}: the same gradient norm to {off:.1e} (1e-4)", off <= 1e-4)
        seconds, memory = shared["s"] / apart["s"], shared["MiB"] / apart["MiB"]
        most = 1.1 if shape == "strangers" else 0.7
        report.target(f"{what}: {seconds:.2f} of the time (at most {most})", seconds <= most)
        report.target(f"{what}: {memory:.2f} of the memory (at most 1.1)", memory <= 1.1)


def sequence(report: Report, tokens: int) -> None:
    logits, logprobs = (part("sequence", kind, SMALL, tokens, ranks=2) for kind in ("logits", "logprobs"))
    memory = logprobs["MiB"] / logits["MiB"]
    what = f"one of 2 ranks, row of {tokens}, {SMALL}"
    row(report, what, "gathers logits", logits, 1.0, 1.0)
    row(report, what, "gathers logprobs", logprobs, memory, logprobs["s"] / logits["s"])
    report.target(f"{what}: {memory:.2f} of the memory with logits gathered (at most 0.5)", memory <= 0.5)
    off = abs(logprobs["loss"] - logits["loss"])
    report.target(f"{what}: the same loss to {off:.1e} (1e-4)", off <= 1e-4)


def profile(report: Report, model: Path, folder: Path, steps: int) -> None:
    """Mean seconds of each phase, as every run ships them in metrics.jsonl, the first step left out."""
    sys.path.insert(0, str(HERE.parent / "tests" / "trainer"))
    from trainer_kit import MiniGateway

    groups, size = 16, 8
    values: dict[str, Any] = {"model": str(model), "run_dir": str(folder)}
    values["rollout"] = {"groups_per_step": groups, "group_size": size}
    values["trainer"] = {"steps": steps, "checkpoint_every": 0}
    run = RunDir.create(RunConfig.parse(values))
    with MiniGateway(model, groups=groups, size=size, reply=48) as gateway:
        subprocess.run(
            [sys.executable, "-m", "areal_trainers.main", "--run-dir", str(folder)],
            env=os.environ | {"AREAL_GATEWAY_URL": gateway.url, "AREAL_ADMIN_KEY": MiniGateway.KEY},
            check=True,
        )
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    later = [line for line in lines if line.get("source") == "trainer"][1:]
    mean = {phase: sum(line[f"{phase}_s"] for line in later) / len(later) for phase in PHASES}
    report.facts[f"one step, {groups} x {size} sessions, {later[0]['tokens']:.0f} tokens, seconds"] = sum(
        mean.values()
    )
    for phase, seconds in mean.items():
        report.facts[f"  {phase}"] = seconds
    summary = run.read("trainer.json") or {}
    report.facts["peak memory of the trainer, MiB"] = float(summary["peak_memory_mib"])


def row(
    report: Report, what: str, kind: str, values: dict[str, float], memory: float, seconds: float
) -> None:
    report.rows.append(
        {
            "what": what,
            "variant": kind,
            "peak MiB": values["MiB"],
            "of": memory,
            "seconds": values["s"],
            "of ": seconds,
        }
    )


def part(*arguments: object, ranks: int = 1) -> dict[str, float]:
    """Run one measurement of _trainer_part.py and return what it printed."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "_trainer_part.py"), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def quick_start_model(scratch: Path) -> Path:
    """The examples' tokenizer and model shape, weights blank, with a context for the longest sequence."""
    sys.path.insert(0, str(HERE.parent / "examples" / "agents"))
    from small_model.warm_start import RECIPE, blank

    folder = blank(scratch / "model", RECIPE, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


if __name__ == "__main__":
    main(__doc__ or "", measure)
