"""What becomes of each request field of Anthropic's Messages API."""

from __future__ import annotations

from areal_gateway.dialects.constraints import FORCED_TOOLS, JSON_FORMATS
from areal_gateway.dialects.fields import Field, Treatment

_T = Treatment
_DISTRIBUTION = "the run pins how the policy is sampled"
_WISH = f"{_DISTRIBUTION}, unless sampling.pinned is false"
_SERVICE = "it concerns Anthropic's own service"


PROMPT_FIELDS: dict[str, Field] = {
    "model": Field(_T.HONOURED, "any name is served by the policy, and echoed"),
    "messages": Field(
        _T.HONOURED,
        "text, tool_use, tool_result and thinking blocks; images and documents are refused, and so is a last "
        "message of the assistant",
    ),
    "system": Field(_T.HONOURED, "a string, or text blocks, which are joined without a separator"),
    "tools": Field(_T.HONOURED, "tools with an input_schema; Anthropic's own server tools are refused"),
    "tool_choice": Field(_T.HONOURED, FORCED_TOOLS),
    "thinking": Field(
        _T.HONOURED,
        "enabled or adaptive shows what the model thought; whether it thinks, and how long, is the run's template's",
    ),
    "output_config": Field(_T.HONOURED, f"format: {JSON_FORMATS}; effort: the model has no such switch"),
    "output_format": Field(_T.HONOURED, "the older name of output_config.format"),
    "cache_control": Field(_T.IGNORED, "prompts are cached anyway"),
    "speed": Field(_T.IGNORED, _SERVICE),
    "user_profile_id": Field(_T.IGNORED, _SERVICE),
    "workspace_id": Field(_T.IGNORED, _SERVICE),
    "betas": Field(_T.IGNORED, _SERVICE),
    "context_management": Field(_T.IGNORED, "history is the agent's; nothing is cleared behind its back"),
    "mcp_servers": Field(_T.REFUSED, "the gateway opens no connections for a client", lambda v: v == []),
}
"""Those that decide the prompt; all that counting tokens looks at."""

FIELDS: dict[str, Field] = {
    **PROMPT_FIELDS,
    "max_tokens": Field(_T.HONOURED, "required; lowered to the run's cap and the room in the context"),
    "stop_sequences": Field(_T.HONOURED, "ends the reply, and is not part of its text"),
    "stream": Field(_T.HONOURED, "server-sent events"),
    "metadata": Field(_T.HONOURED, "labels of the call"),
    "temperature": Field(_T.PINNED, _WISH),
    "top_p": Field(_T.PINNED, _WISH),
    "top_k": Field(_T.PINNED, _WISH),
    "container": Field(_T.REFUSED, "there is no code container behind this model"),
    "service_tier": Field(_T.IGNORED, _SERVICE, lambda v: v == "auto"),
    "inference_geo": Field(_T.IGNORED, _SERVICE),
    "diagnostics": Field(_T.IGNORED, _SERVICE),
}
