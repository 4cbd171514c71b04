"""The calculator agent as a program of its own, pointed at the gateway by hand.

It could be in any language: it reads a task as JSON on stdin, talks to the model at OPENAI_BASE_URL with
OPENAI_API_KEY, and prints the answer. Beside a gateway that is already running,

    OPENAI_BASE_URL=http://127.0.0.1:PORT/v1 OPENAI_API_KEY=SESSION_KEY python examples/agents/base_url.py \\
        <<< '{"question": "Tom has 37 boxes of 12 pens. How many pens is that?"}'

and as the agent of a training run, one process a session:

    areal_agent.train(areal_agent.Command([sys.executable, "examples/agents/base_url.py"]), reward, ...)
"""

from __future__ import annotations

import asyncio
import json
import sys

from calculator import agent


def main() -> None:
    answer = asyncio.run(agent(json.load(sys.stdin)))
    print(answer if answer is not None else "no answer")


if __name__ == "__main__":
    main()
