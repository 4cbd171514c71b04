"""The public face, pinned; and importing it needs nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import areal_agent

FACE = {
    "AgentError", "ArealError", "Command", "ConfigError", "EngineError", "EvalResult", "GatewayClient",
    "GatewayError", "RewardError", "RunConfig", "Session", "TrainResult", "TrainerError",
    "WeightUpdateError", "add_label_source", "aevaluate", "arollout", "atrain", "evaluate", "exact_match",
    "observe", "rollout", "train", "unobserve",
}  # fmt: skip


def test_the_public_names_are_exactly_these():
    assert set(areal_agent.__all__) == set(dir(areal_agent)) == FACE
    for name in FACE:
        value = getattr(areal_agent, name)
        assert callable(value), name
        assert value.__doc__, f"{name} has a docstring"


def python(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_sdk_imports_and_runs_with_the_heavy_parts_blocked():
    done = python("""
        import sys
        for name in ("torch", "transformers", "vllm", "numpy", "aiohttp", "safetensors", "tensorboard"):
            sys.modules[name] = None  # importing it raises ImportError
        import areal_agent
        for name in areal_agent.__all__:
            getattr(areal_agent, name)
        from areal_agent import cli, checks, script
        try:
            checks.installed(trainer=True)
        except areal_agent.ConfigError as e:
            print(e)
        """)
    assert done.returncode == 0, done.stderr
    assert "pip install 'areal-agent[gateway,trainer]'" in done.stdout


def test_importing_the_package_loads_nothing_of_it():
    done = python("""
        import sys, areal_agent
        print([m for m in sys.modules if m.startswith("areal_agent.") or m in ("httpx", "pydantic", "rich")])
        """)
    assert done.stdout.strip() == "[]"


def test_the_functions_keep_their_names_when_their_modules_are_imported_first():
    done = python("""
        from areal_agent.observe import bind
        from areal_agent.train import atrain
        import areal_agent
        print(callable(areal_agent.observe), callable(areal_agent.train), areal_agent.train.__name__)
        """)
    assert done.stdout.strip() == "True True train"
