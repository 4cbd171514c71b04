"""Which driver an engine gets: chosen by what its server says it serves, never by a version's name."""

from __future__ import annotations

from typing import Literal

from areal_agent.errors import EngineError
from areal_gateway.fleet.event import COMPLETIONS, GENERATE
from areal_gateway.fleet.http import EngineHTTP
from areal_gateway.fleet.protocol import EngineDriver
from areal_gateway.fleet.resubmit import ResubmitDriver
from areal_gateway.fleet.spans import SpansDriver

Choice = Literal["auto", "spans", "resubmit"]

NEEDS_SPANS = frozenset({GENERATE, "/pause", "/update_weight_version", "/weight_info"})
"""What the spans driver calls. A server that keeps a version label stamps its tokens with it."""


async def drive(url: str, model: str | None, choice: Choice, timeout_s: float) -> EngineDriver:
    """A driver for the server at `url`.

    Raises EngineError: it cannot be asked, or lacks what the driver (`choice`, or any) needs.
    """
    http = EngineHTTP(url, model)
    try:
        paths = await http.paths(timeout_s)
    finally:
        await http.close()
    lacks = sorted(NEEDS_SPANS - paths)
    if choice == "spans" and lacks:
        raise EngineError(f"engine {url} has no {', '.join(lacks)}; set fleet.driver to resubmit or auto")
    if choice != "resubmit" and not lacks:
        return SpansDriver(url, model)
    if GENERATE not in paths and COMPLETIONS not in paths:
        raise EngineError(f"engine {url} has neither {GENERATE} nor {COMPLETIONS}: it is no vLLM server")
    if "/collective_rpc" not in paths:
        raise EngineError(
            f"engine {url} has no /collective_rpc, so that it cannot be given weights; "
            "start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls"
        )
    return ResubmitDriver(url, model, paths)
