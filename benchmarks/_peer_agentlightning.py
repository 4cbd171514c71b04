"""agent-lightning's LLM proxy in front of one engine; runs in that package's own environment.

`python _peer_agentlightning.py PORT ENGINE_URL FILE` opens rollouts, writes their URL paths into FILE, and serves
with that package's defaults.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import agentlightning  # type: ignore[import-not-found]
from agentlightning.store.memory import InMemoryLightningStore  # type: ignore[import-not-found]

ROLLOUTS = 200


async def serve(port: int, engine: str, paths: Path) -> None:
    store = InMemoryLightningStore(thread_safe=True)
    params = {"model": "hosted_vllm/policy", "api_base": f"{engine}/v1", "api_key": "none"}
    proxy = agentlightning.LLMProxy(
        port=port,
        host="127.0.0.1",
        model_list=[{"model_name": "policy", "litellm_params": params}],
        # Without this its LiteLLM refuses to start; it is bound to loopback for the run.
        litellm_config={"general_settings": {"dangerously_permit_weak_or_unset_master_key": True}},
        store=store,
        launch_mode="thread",
    )
    await proxy.start()
    opened = [await store.start_rollout(input={"task": i}, mode="train") for i in range(ROLLOUTS)]
    known = json.dumps([f"/rollout/{r.rollout_id}/attempt/{r.attempt.attempt_id}" for r in opened])
    await asyncio.to_thread(paths.write_text, known)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
