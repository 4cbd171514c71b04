"""Tokenizer, template and transcripts of the small model are what the gateway's renderer makes of them."""

import functools
import json
import random
import unicodedata
from itertools import islice

import calculator
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.utils.function_calling import convert_to_openai_tool
from renderers import Qwen3RendererConfig, create_renderer
from small_model import fingerprint
from small_model.questions import questions
from small_model.tokenizer import MARKERS, SPECIAL, train_tokenizer
from small_model.transcripts import TOOL_FORMS, Renderer, conversation, tokenizer_texts, transcripts

KINDS = ("right", "guess", "wrong_operator")


@functools.cache
def small_tokenizer():
    return train_tokenizer(tokenizer_texts(seed=0), vocab_size=1024)


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def oracle(tokenizer):
    return create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return Renderer(tokenizer)


def conversations(count):
    rng = random.Random(7)
    for question in islice(questions("train", seed=5), count):
        yield conversation(question, rng.choice(KINDS), rng)


def test_the_tool_forms_are_what_the_agents_send():
    from langgraph_react import calculator as langchain_tool

    sent = [calculator.TOOL, convert_to_openai_tool(langchain_tool)]
    assert [json.dumps(tool) for tool in TOOL_FORMS] == [json.dumps(tool) for tool in sent]


def test_template_and_renderer_agree_on_tool_conversations(tokenizer, oracle):
    extra = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi é 12?"}],
        [
            {"role": "user", "content": "two"},
            {
                "role": "assistant",
                "content": "both",
                "tool_calls": [
                    {"type": "function", "function": {"name": "calculator", "arguments": a}}
                    for a in ('{"expression": "1+1"}', {"expression": "2*2"})
                ],
            },
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "2 and 4"},
            {"role": "user", "content": "and?"},
        ],
    ]
    for messages in [*conversations(40), *extra]:
        for tools in (None, *([tool] for tool in TOOL_FORMS)):
            for ask in (False, True):
                by_template = tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=ask, return_dict=False
                )
                by_renderer = oracle.render_ids(messages, tools=tools, add_generation_prompt=ask)
                assert by_template == by_renderer


@pytest.mark.parametrize("form", range(len(TOOL_FORMS)))
def test_the_cached_preamble_changes_no_token(renderer, oracle, form):
    for messages in conversations(40):
        whole = oracle.render_ids(messages, tools=[TOOL_FORMS[form]])
        assert renderer.transcript(messages, form).token_ids == whole[:-1]  # all but the last line break
        asked = oracle.render_ids(messages[:1], tools=[TOOL_FORMS[form]], add_generation_prompt=True)
        assert renderer.prompt(messages[:1], form) == asked


def test_loss_falls_on_replies_exactly_and_prompts_are_the_gateways(renderer, oracle, tokenizer):
    """Oracle: walk the turns as the gateway does, rendering the first prompt and bridging the rest."""
    for messages in conversations(40):
        made = renderer.transcript(messages)
        prompt = oracle.render_ids(messages[:1], tools=[TOOL_FORMS[0]], add_generation_prompt=True)
        for turn in range(1, len(messages), 2):
            end = made.token_ids.index(renderer.stop, len(prompt)) + 1
            reply = made.token_ids[len(prompt) : end]
            assert made.token_ids[: len(prompt)] == prompt
            assert all(made.loss_mask[len(prompt) : end])
            text, expression = renderer.parse(reply)
            call = messages[turn].get("tool_calls")
            assert text == messages[turn]["content"]
            assert expression == (
                json.loads(call[0]["function"]["arguments"])["expression"] if call else None
            )
            if turn + 1 < len(messages):
                bridged = oracle.bridge_to_next_turn(
                    prompt, reply, [messages[turn + 1]], tools=[TOOL_FORMS[0]]
                )
                assert bridged is not None
                assert not any(made.loss_mask[end : len(bridged.token_ids)])
                prompt = bridged.token_ids
        assert end == len(made.token_ids)
        assert sum(made.loss_mask) < len(made.token_ids) / 2


@given(st.text(max_size=60).filter(lambda t: not any(s in t for s in SPECIAL + MARKERS)))
def test_any_text_survives_the_tokenizer(text):
    tokenizer = small_tokenizer()
    text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_and_markers_are_tokens_of_their_own(tokenizer):
    for token in SPECIAL + MARKERS:
        assert (
            tokenizer.encode(f"a{token}b", add_special_tokens=False).count(
                tokenizer.convert_tokens_to_ids(token)
            )
            == 1
        )
    for digit in "0123456789":
        holding = [t for t in tokenizer.get_vocab() if digit in t]
        assert holding == [digit]


def test_the_preamble_is_short(renderer):
    """What every prompt of every call pays; 131 tokens when merges stop at words."""
    assert len(renderer.prompt([{"role": "user", "content": ""}])) < 60


def test_kinds_of_transcripts_come_in_the_shares_asked_for(renderer, tokenizer):
    mix = {"guess": 0.5, "right": 0.5}
    texts = [
        tokenizer.decode(t.token_ids)
        for t in islice(transcripts(renderer, questions("warm", 0), mix, 0), 400)
    ]
    guesses = sum(text.count("<tool_call>") == 2 for text in texts)  # the preamble has two, a call one more
    assert 0.4 < guesses / len(texts) < 0.6


def test_bad_transcripts_are_bad():
    rng = random.Random(0)
    for question in islice(questions("warm", 0), 300):
        guess = conversation(question, "guess", rng)[-1]["content"]
        assert calculator.reward(question.task, guess) == 0.0
        assert calculator.reward(question.task, conversation(question, "right", rng)[-1]["content"]) == 1.0


def test_the_cache_key_follows_the_seed():
    assert fingerprint(0) == fingerprint(0) != fingerprint(1)
