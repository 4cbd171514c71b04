"""The agent as a program of its own finds the gateway by its environment alone."""

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "agents" / "base_url.py"


async def test_it_reads_a_task_asks_the_model_it_is_pointed_at_and_prints_the_answer():
    seen = []

    async def reply(request: web.Request) -> web.Response:
        seen.append((request.headers["authorization"], (await request.json())["messages"]))
        message = {"role": "assistant", "content": "The answer is 7."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": f"http://{host}:{port}/v1", "OPENAI_API_KEY": "by-hand"},
        )
        task = json.dumps({"question": "3 and 4?", "answer": 7}).encode()
        out, _ = await asyncio.wait_for(process.communicate(task), 60)
    finally:
        await runner.cleanup()
    assert out.decode().strip() == "The answer is 7."
    assert seen == [("Bearer by-hand", [{"role": "user", "content": "3 and 4?"}])]
