"""A service that is trained while it serves: it knows a base_url, a key, and how its users liked the answers.

Start the run; it prints the address to point a service at, and where the key is:

    areal-agent train --online --model path/to/model --set rollout.groups_per_step=2 --set rollout.group_size=4

In another shell, with what it printed:

    OPENAI_BASE_URL=http://127.0.0.1:PORT/v1 OPENAI_API_KEY=$(cat runs/online-TIME/project.key) \\
        python examples/agents/online_service.py
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from statistics import fmean

from openai import APIConnectionError, AsyncOpenAI

Judge = Callable[[str], float]
"""What a user thinks of an answer, from 0 to 1."""

USERS = 8
"""At once."""


async def conversation(client: AsyncOpenAI, user: str, questions: list[str], liked: Judge) -> float:
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
    await feedback(client, {"value": fmean(scores), "key": "left"}, named)
    return fmean(scores)


async def feedback(client: AsyncOpenAI, body: dict, headers: dict[str, str] | None = None) -> None:
    """`key` makes a repeated request count once."""
    await client.post("/rewards", body=body, cast_to=object, options={"headers": headers or {}})


async def main(conversations: int) -> None:
    """Users come one after another, USERS of them at once, until `conversations` were had or the run has ended."""
    numbers, scores = iter(range(conversations)), []

    async def users() -> None:
        for n in numbers:
            scores.append(await conversation(client, f"user-{n}", ["Hello!", "And now?"], brief))
            if len(scores) % 100 == 0:
                print(
                    f"{len(scores)} conversations, the last 100 were liked {fmean(scores[-100:]):.3f}",
                    flush=True,
                )

    async with AsyncOpenAI() as client:
        try:
            await asyncio.gather(*(users() for _ in range(USERS)))
        except APIConnectionError:
            print(f"the gateway is gone after {len(scores)} conversations: the run has ended")


def brief(answer: str) -> float:
    """A user who likes short answers."""
    return 1.0 / (1.0 + len(answer) / 100)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
