"""A model that thinks: Qwen3's template drops old thoughts at each new question, so that turn is another branch."""

from __future__ import annotations

from typing import Any

from gateway_support import CALCULATOR, Served, tool_call

THOUGHT = "<think>\nTwo and three.\n</think>\n\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_every_sampled_token_is_trained_once_over_tool_loops_and_new_questions(
    thinking: Served,
) -> None:
    fleet = thinking.fleet
    fleet.say(*(f"{THOUGHT}{said}" for said in (tool_call(), "Five.", tool_call(), "Six.", "Bye.")))
    session = await thinking.open()
    messages: list[Any] = [user("Two plus three?")]
    for turn in ("tool", "user", "tool", "user", None):
        _, _, body = await thinking.post(session, {"messages": messages, "tools": [CALCULATOR]})
        reply = body["choices"][0]["message"]
        assert reply["reasoning_content"] == "Two and three."
        messages.append(reply)
        if turn == "tool":
            call = reply["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": call, "content": "5"})
        elif turn == "user":
            messages.append(user("And?"))

    body = await thinking.inspect(session, trajectory=True)
    causes = [c["branch_cause"] for c in body["calls"]]
    assert causes == ["root", None, "bridge_refused", None, "bridge_refused"]
    asked = fleet.asked
    for before, after in ((0, 1), (2, 3)):  # inside a tool loop the thoughts stay, to the id
        stored = asked[before].prompt_ids + asked[before].output_ids
        assert asked[after].prompt_ids[: len(stored)] == stored
    text = thinking.gateway.tokens.text
    assert text(asked[3].prompt_ids).count("Two and three.") == 1
    assert text(asked[4].prompt_ids).count("Two and three.") == 0

    leaves = [a.prompt_ids + a.output_ids for a in (asked[1], asked[3], asked[4])]
    assert [s["token_ids"] for s in body["sequences"]] == leaves
    trained = [
        [t for t, m in zip(s["token_ids"], s["loss_mask"], strict=True) if m] for s in body["sequences"]
    ]
    assert trained == [
        asked[0].output_ids + asked[1].output_ids,
        asked[2].output_ids + asked[3].output_ids,
        asked[4].output_ids,
    ]
