"""What becomes of each request field of OpenAI's Responses API."""

from __future__ import annotations

from areal_gateway.dialects.constraints import FORCED_TOOLS, JSON_FORMATS, PARALLEL_CALLS, TOP_LOGPROBS
from areal_gateway.dialects.fields import Field, Treatment

_T = Treatment
_DISTRIBUTION = "the run pins how the policy is sampled"
_WISH = f"{_DISTRIBUTION}, unless sampling.pinned is false"
_SERVICE = "it concerns OpenAI's own service"
_TEMPLATE = "the run's template decides about thinking"


PROMPT_FIELDS: dict[str, Field] = {
    "model": Field(_T.HONOURED, "any name is served by the policy, and echoed"),
    "input": Field(
        _T.HONOURED,
        "text, or items: messages, function_call, function_call_output, reasoning, item_reference; images, files "
        "and items of OpenAI's own tools are refused",
    ),
    "instructions": Field(
        _T.HONOURED, "a system message before all others; not carried over to the next response"
    ),
    "previous_response_id": Field(
        _T.HONOURED,
        "found in the ledger, also after a restart and with store=false; of the same session only",
    ),
    "tools": Field(_T.HONOURED, "functions; OpenAI's own tools are refused"),
    "tool_choice": Field(_T.HONOURED, FORCED_TOOLS),
    "parallel_tool_calls": Field(_T.IGNORED, PARALLEL_CALLS, lambda v: v is True),
    "conversation": Field(
        _T.REFUSED, "there are no conversation objects; send `previous_response_id` or the items"
    ),
    "prompt": Field(_T.REFUSED, "prompt templates are stored at OpenAI; send `instructions` and `input`"),
    "reasoning": Field(_T.IGNORED, _TEMPLATE),
    "personality": Field(_T.IGNORED, "the model has no such switch"),
    "text": Field(_T.HONOURED, f"format: {JSON_FORMATS}; verbosity: the model has no such switch"),
    "truncation": Field(
        _T.IGNORED, "history is never cut behind the agent's back", lambda v: v == "disabled"
    ),
    "context_management": Field(_T.IGNORED, "history is the agent's; nothing is compacted behind its back"),
}
"""Those that decide the prompt; all that counting tokens looks at."""

FIELDS: dict[str, Field] = {
    **PROMPT_FIELDS,
    "max_output_tokens": Field(_T.HONOURED, "lowered to the run's cap and the room in the context"),
    "stream": Field(_T.HONOURED, "server-sent events"),
    "stream_options": Field(
        _T.IGNORED, "nothing is padded", lambda v: v in ({}, {"include_obfuscation": False})
    ),
    "include": Field(
        _T.HONOURED,
        "message.output_text.logprobs, of all sampled tokens; of the rest there is nothing to include",
    ),
    "top_logprobs": Field(_T.HONOURED, TOP_LOGPROBS),
    "metadata": Field(_T.HONOURED, "labels of the call, and echoed"),
    "temperature": Field(_T.PINNED, _WISH),
    "top_p": Field(_T.PINNED, _WISH),
    "background": Field(
        _T.REFUSED, "replies are given on the request's own connection", lambda v: v is False
    ),
    "background_options": Field(_T.IGNORED, _SERVICE),
    "max_tool_calls": Field(_T.IGNORED, "it limits OpenAI's own tools, and there are none"),
    "image": Field(_T.IGNORED, "there are no images"),
    "moderation": Field(_T.IGNORED, _SERVICE),
    "access_programs": Field(_T.IGNORED, _SERVICE),
    "store": Field(_T.IGNORED, "the ledger keeps every reply", lambda v: v is True),
    "service_tier": Field(_T.IGNORED, _SERVICE, lambda v: v in ("auto", "default")),
    "user": Field(_T.IGNORED, _SERVICE),
    "safety_identifier": Field(_T.IGNORED, _SERVICE),
    "prompt_cache_key": Field(_T.IGNORED, _SERVICE),
    "prompt_cache_options": Field(_T.IGNORED, _SERVICE),
    "prompt_cache_retention": Field(_T.IGNORED, _SERVICE),
}
