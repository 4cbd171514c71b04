"""A service that is trained while it serves: it knows a base_url, a key, and how its users liked the answers.

    areal-agent gateway --model FOLDER --run-dir runs/online --set online.enabled=true
    OPENAI_BASE_URL=http://127.0.0.1:PORT/v1 OPENAI_API_KEY=$(cat runs/online/project.key) \\
        python examples/agents/online_service.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from openai import AsyncOpenAI

Judge = Callable[[str], float]
"""What a user thinks of an answer, from 0 to 1."""


async def conversation(client: AsyncOpenAI, user: str, questions: list[str], liked: Judge) -> None:
    """One user's conversation; each answer is judged when it is read, and the whole when the user leaves."""
    named = {"x-areal-session": user}  # without it the gateway tells conversations apart by what was said
    messages: list = []
    scores = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        reply = await client.chat.completions.create(model="policy", messages=messages, extra_headers=named)
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        scores.append(liked(answer))
        await feedback(client, {"response_id": reply.id, "value": scores[-1], "key": reply.id})
    await feedback(client, {"value": sum(scores) / len(scores), "key": "left"}, named)


async def feedback(client: AsyncOpenAI, body: dict, headers: dict[str, str] | None = None) -> None:
    """`key` makes a repeated request count once."""
    await client.post("/rewards", body=body, cast_to=object, options={"headers": headers or {}})


async def main() -> None:
    async with AsyncOpenAI() as client:
        talks = [conversation(client, f"user-{n}", ["Hello!", "And now?"], brief) for n in range(8)]
        await asyncio.gather(*talks)


def brief(answer: str) -> float:
    """A user who likes short answers."""
    return 1.0 / (1.0 + len(answer) / 100)


if __name__ == "__main__":
    asyncio.run(main())
