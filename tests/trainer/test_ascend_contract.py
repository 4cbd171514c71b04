"""The names our Ascend code uses exist in the wheels it will meet. Their sources are read, never imported.

What is checked is derived from our own source, so a name added to the platform is checked from then on.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_trainers import varlen
from areal_trainers.platform import npu

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".cache" / "wheels"
TORCH_NPU = ("torch-npu", "2.13.0", "manylinux_2_28_x86_64")
VLLM_ASCEND = ("vllm-ascend", "0.23.0", "manylinux_2_34_x86_64")
OFFLINE = ("No matching distribution", "Could not fetch URL", "Connection", "Temporary failure")

Sources = dict[str, str]
"""Path in the wheel -> its text."""


def fetch(wanted: tuple[str, str, str]) -> Sources:
    """The wheel's Python sources; the wheel is downloaded once into .cache/."""
    name, version, platform = wanted
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(WHEELS.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", platform, "--python-version", "3.11", "--implementation", "cp"]
        command += ["--abi", "cp311", "-d", str(WHEELS), f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0 and any(word in done.stderr for word in OFFLINE):
            pytest.skip(f"no package index that has {name} {version} can be reached: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
    out = {}
    with zipfile.ZipFile(next(WHEELS.glob(pattern))) as wheel:
        for path in wheel.namelist():
            if path.endswith(".py") and path.startswith(name.replace("-", "_") + "/"):
                out[path] = wheel.read(path).decode()
    return out


@pytest.fixture(scope="module")
def torch_npu() -> Sources:
    return fetch(TORCH_NPU)


@pytest.fixture(scope="module")
def vllm_ascend() -> Sources:
    return fetch(VLLM_ASCEND)


def trees(sources: Sources, word: str, below: str = "") -> Iterator[ast.Module]:
    """Syntax trees of the files that hold `word`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their escape sequences
        for path, text in sources.items():
            if path.startswith(below) and word in text:
                yield ast.parse(text)


@dataclass(frozen=True)
class Call:
    """`name(...)` as our code makes it."""

    name: str
    positional: int
    keywords: tuple[str, ...] = ()


def calls_on(tree: ast.AST, owner: str) -> set[Call]:
    """Calls of `owner.NAME(...)` in our source, where `owner` is a dotted name such as self._npu."""
    return {
        Call(n.func.attr, len(n.args), tuple(k.arg or "**" for k in n.keywords))
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and ast.unparse(n.func.value) == owner
    }


def definitions(sources: Sources, name: str, below: str = "") -> Iterator[ast.FunctionDef]:
    for tree in trees(sources, f"def {name}(", below):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield node


def accepts(function: ast.FunctionDef, call: Call) -> bool:
    """Whether the call fits the signature."""
    a = function.args
    names = [x.arg for x in (*a.posonlyargs, *a.args)]
    required = set(names[: len(names) - len(a.defaults)][call.positional :])
    fits = call.positional <= len(names) or a.vararg is not None
    known = set(names[call.positional :]) | {x.arg for x in a.kwonlyargs}
    return fits and required <= set(call.keywords) and (set(call.keywords) <= known or a.kwarg is not None)


OURS = ast.parse(Path(npu.__file__).read_text())
CALLS = sorted(calls_on(OURS, "self._npu"), key=lambda c: c.name)


def test_the_platform_uses_torch_npu_at_all() -> None:
    """The derivation below sees our calls: the protocol's device, memory, cache, RNG and synchronisation."""
    assert {"set_device", "empty_cache", "synchronize", "get_rng_state"} <= {c.name for c in CALLS}


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.name)
def test_a_function_of_torch_npu_takes_what_we_give_it(torch_npu: Sources, call: Call) -> None:
    (front,) = trees(torch_npu, "", "torch_npu/npu/__init__.py")
    (listed,) = (
        n.value
        for n in front.body
        if isinstance(n, ast.Assign) and [ast.unparse(t) for t in n.targets] == ["__all__"]
    )
    exported = ast.literal_eval(listed)
    assert call.name in exported
    found = list(definitions(torch_npu, call.name, "torch_npu/npu/"))
    assert any(accepts(f, call) for f in found), [ast.unparse(f.args) for f in found]


def test_the_process_group_is_built_as_torch_npu_builds_its_own(torch_npu: Sources) -> None:
    """The binding is compiled; torch_npu's own registration of the backend shows what it takes."""
    text = torch_npu["torch_npu/_init/registry/distributed.py"]
    modules = {
        n.value
        for n in ast.walk(OURS)
        if isinstance(n, ast.Constant) and str(n.value).startswith("torch_npu.")
    }
    assert modules == {"torch_npu._C._distributed_c10d"}
    (ours,) = (c for c in calls_on(OURS, "c10d"))
    assert (ours.name, ours.positional) == ("ProcessGroupHCCL", 4)
    built = [
        n
        for tree in trees(torch_npu, "ProcessGroupHCCL(")
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == f"{next(iter(modules))}.{ours.name}"
    ]
    assert built
    assert {len(n.args) for n in built} == {ours.positional}
    options = [ast.unparse(t) for n in ast.walk(OURS) if isinstance(n, ast.Assign) for t in n.targets]
    assert "options._timeout" in options
    assert f"{next(iter(modules))}.{ours.name}.Options()" in text
    assert "._timeout = " in text
    assert npu.NpuPlatform.backend in text


def test_torch_npu_reads_the_visible_devices_variable(torch_npu: Sources) -> None:
    name = npu.NpuPlatform.visible_devices_env
    assert name is not None
    assert any(
        isinstance(n, ast.Constant) and n.value == name
        for tree in trees(torch_npu, name)
        for n in ast.walk(tree)
    )


def test_the_engine_reloads_layers_as_our_receiver_does(vllm_ascend: Sources) -> None:
    """vllm-ascend's own worker calls vLLM's reload functions; ours must give them as many arguments."""
    ours = ast.parse((ROOT / "gateway" / "areal_gateway" / "worker_extension.py").read_text())
    (theirs,) = trees(vllm_ascend, "", "vllm_ascend/worker/worker.py")

    def reloads(tree: ast.AST) -> dict[str, int]:
        return {
            n.func.id: len(n.args) + len(n.keywords)
            for n in ast.walk(tree)
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Name)
            and n.func.id.endswith("layerwise_reload")
        }

    assert len(reloads(ours)) == 2
    assert reloads(ours) == reloads(theirs)


def test_the_fused_attention_takes_what_we_give_it(torch_npu: Sources) -> None:
    """Against the signature torch_npu registers for tracing, which is the operator's."""
    (ours,) = (
        n
        for n in ast.parse(Path(varlen.__file__).read_text()).body
        if isinstance(n, ast.FunctionDef) and n.name == "npu_attention"
    )
    (call,) = (
        n
        for n in ast.walk(ours)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr.startswith("npu_")
    )
    band = {
        k.value
        for n in ast.walk(ours)
        if isinstance(n, ast.Dict)
        for k in n.keys
        if isinstance(k, ast.Constant)
    }
    assert len(band) == 2  # what `**band` stands for
    given = {k.arg for k in call.keywords if k.arg} | band
    name = ast.unparse(call.func).rpartition(".")[2]
    found = list(definitions(torch_npu, f"{name}_forward", "torch_npu/op_plugin/meta/"))
    assert found
    assert all(accepts(f, Call(name, len(call.args), tuple(sorted(given)))) for f in found)


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return found


def members(cls: ast.ClassDef) -> set[str]:
    """Names a class gives its instances: methods, class attributes, and what its methods assign to self."""
    names = {n.name for n in cls.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for n in ast.walk(cls):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self":
            names.add(n.attr)
    for n in cls.body:
        valued = isinstance(n, ast.AnnAssign) and n.value is not None  # else it only declares
        targets = n.targets if isinstance(n, ast.Assign) else [n.target] if valued else []
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


def test_the_engines_worker_takes_our_extension(vllm_ascend: Sources) -> None:
    """vLLM adds it to the bases of any WorkerBase, and refuses one that redefines a name of the worker."""
    ours = class_of(
        ast.parse((ROOT / "gateway" / "areal_gateway" / "worker_extension.py").read_text()),
        "AREALWorkerExtension",
    )
    worker = class_of(ast.parse(vllm_ascend["vllm_ascend/worker/worker.py"]), "NPUWorker")
    assert [ast.unparse(b) for b in worker.bases] == ["WorkerBase"]
    there = members(worker)
    if (vllm := importlib.util.find_spec("vllm")) is not None and vllm.origin is not None:
        source = Path(vllm.origin).parent / "v1" / "worker" / "worker_base.py"
        there |= members(class_of(ast.parse(source.read_text()), "WorkerBase"))
    methods = {n.name for n in ours.body if isinstance(n, ast.FunctionDef)}
    assert len(methods) > 3
    assert {m for m in members(ours) if not m.startswith("__")} & there == set()
    used = {
        n.attr
        for n in ast.walk(ours)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load) and ast.unparse(n.value) == "self"
    }
    lent = {name for name in used - members(ours) if not name.startswith("__")}
    assert "model_runner" in lent
    assert lent <= there, f"the worker has no {sorted(lent - there)}"


def test_the_engine_knows_the_layout_it_must_keep_for_reloads(vllm_ascend: Sources) -> None:
    """`weight_nz_mode` = 0: the fleet gives it to every engine on Ascend (--additional-config)."""
    assert '"weight_nz_mode"' in vllm_ascend["vllm_ascend/ascend_config.py"]


def test_no_other_file_of_the_trainer_branches_on_the_device_family() -> None:
    """Everything that differs is behind Platform: outside it nothing compares with a family's name."""
    families = {"cuda", "npu", "hccl", "nccl"}
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted((ROOT / "trainers" / "areal_trainers").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and families & {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
    ]
    assert found == []
