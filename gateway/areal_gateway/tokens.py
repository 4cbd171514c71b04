"""Messages to token ids and back, for one model.

Invariant: what was sampled is continued as those ids. `bridge` returns what follows the stored prompt and
output, where the renderer leaves those as they are, verified here, or None; it never re-tokenises a reply. Rendering and parsing are the
`renderers` package's; a model it does not know is rendered by its own chat template.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from renderers import ParsedResponse, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import DefaultRendererConfig, Qwen3RendererConfig, config_from_name

from areal_agent.config import GatewayConfig
from areal_agent.errors import ConfigError, GatewayError
from areal_gateway.byte_level import TokenBytes, byte_level
from areal_gateway.repeated_texts import RepeatedTexts

log = logging.getLogger(__name__)

QWEN3_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

REPLY_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")


class Renderer(Protocol):
    """What is used of a renderer of the `renderers` package."""

    def render_ids(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]: ...
    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse: ...
    def get_stop_token_ids(self) -> list[int]: ...
    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Any,
        *,
        tools: Any = None,
    ) -> Any: ...


class FastTokenizer:
    """A `tokenizers.Tokenizer` behind the interface that renderers ask for.

    The same ids as `transformers` gives, without its 100 µs per call and without the offsets that would
    only be used to attribute tokens to messages, which the gateway does not need.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, name: str, eos: int | None, unk: int | None) -> None:
        self._backend = backend
        self._known = RepeatedTexts(self._encode)
        self._bytes = TokenBytes(backend) if byte_level(backend) else None
        self.name_or_path = name
        self.eos_token_id = eos
        self.unk_token_id = unk

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self._known.encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode` it lets other threads run meanwhile, and keeps no offsets.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if self._bytes is not None and not skip_special_tokens:
            return self._bytes.text(ids)
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            found = self._backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(t) for t in tokens]


@dataclass(frozen=True, slots=True)
class ReplySyntax:
    """How a model writes a reply, as far as a grammar has to know it. The default: not known.

    Attributes:
        known: nothing but what is said here comes before or after a reply's text.
        json_calls: tools are called as Qwen3 and Hermes do, with JSON between `<tool_call>` and `</tool_call>`.
        thinks: the reply begins with `<think>`.
        ids: token ids of `<tool_call>`, `<think>` and their ends, of those that there are.
    """

    known: bool = False
    json_calls: bool = False
    thinks: bool = False
    ids: Mapping[str, int] = field(default_factory=dict)


class Tokens:
    """Rendering, bridging and parsing for one model. All methods are pure; none blocks on I/O."""

    bridges_whole = False
    """Whether a bridge tokenises the whole conversation, and not only what is new."""

    def __init__(
        self,
        renderer: Renderer,
        tokenizer: Any,
        *,
        context: int,
        supports_tools: bool = True,
        name: str = "",
        syntax: ReplySyntax = ReplySyntax(),
    ) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.context = context
        """Most tokens of prompt and reply together."""
        self.supports_tools = supports_tools
        self.name = name
        self.syntax = syntax
        self.stop_token_ids = list(renderer.get_stop_token_ids())

    @classmethod
    def load(cls, model: str | Path, config: GatewayConfig, context: int | None = None) -> Tokens:
        """From a Hugging Face model folder. Raises ConfigError with what is missing."""
        from areal_gateway.tokens_qwen3 import Qwen3Tokens  # which builds on this class

        folder = Path(model)
        settings = _read_settings(folder)
        hf = _load_tokenizer(folder)
        length = context or _context_length(settings, folder)
        name = config.renderer if config.renderer != "auto" else _pick(settings, hf, folder)
        if name == "template":
            return _from_template(hf, config, length, folder)
        try:
            if name == "qwen3":
                fast = FastTokenizer(
                    hf.backend_tokenizer, name=str(folder), eos=hf.eos_token_id, unk=hf.unk_token_id
                )
                renderer = create_renderer(fast, Qwen3RendererConfig(enable_thinking=config.enable_thinking))
                syntax = ReplySyntax(
                    known=True, json_calls=True, thinks=config.enable_thinking, ids=_markup_ids(hf)
                )
                return Qwen3Tokens(renderer, fast, context=length, name=name, syntax=syntax)
            chosen: Any = config_from_name(name)
            return cls(create_renderer(hf, chosen), hf, context=length, name=name)
        except (ValueError, AssertionError, KeyError, TypeError) as e:
            raise ConfigError(f"renderer {name!r} does not fit the tokenizer in {folder}: {e}") from e

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """A whole conversation, ready for the assistant's turn. Raises GatewayError (400)."""
        if tools and not self.supports_tools:
            raise GatewayError(
                "this model's chat template has no tools; send none, or serve a model that has them",
                status=400,
                code="tools_unsupported",
            )
        try:
            return list(self.renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True))
        except Exception as e:  # a template raises its own types, for messages it does not accept
            raise GatewayError(
                f"the model's chat template refused these messages: {e}", status=400, code="invalid_messages"
            ) from e

    def bridge(
        self,
        conversation: list[dict[str, Any]],
        prompt_ids: Sequence[int],
        output_ids: list[int],
        new_messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> list[int] | None:
        """The ids that follow `prompt_ids + output_ids` in the next prompt, one at least, or None.

        `conversation` is the stored call's, its reply last; `new_messages` are those beyond it.
        """
        before = list(prompt_ids)
        stored = before + output_ids
        try:
            rendered = self.renderer.bridge_to_next_turn(
                before, output_ids, new_messages, tools=tools or None
            )
            ids = None if rendered is None else list(rendered.token_ids)
        except Exception as e:  # a renderer that cannot read these messages cannot bridge them either
            log.warning("the renderer failed to bridge %d messages: %s", len(new_messages), e)
            return None
        if ids is None or len(ids) <= len(stored) or ids[: len(stored)] != stored:
            return None
        return ids[len(stored) :]

    def parse(
        self, output_ids: list[int], prompt_ids: Sequence[int], tools: list[dict[str, Any]]
    ) -> ParsedResponse:
        """A reply as content, reasoning and tool calls. What no parser can read is content."""
        try:
            return self.renderer.parse_response(output_ids, tools=tools or None, prompt_ids=list(prompt_ids))
        except Exception as e:  # a policy may sample anything, such as an integer of 5000 digits
            log.warning(
                "a reply of %d tokens cannot be parsed, it is passed on as text: %s", len(output_ids), e
            )
            return ParsedResponse(content=self.text(self.body(output_ids)).strip())

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def body(self, output_ids: list[int]) -> list[int]:
        """The reply's ids up to the token that ended it."""
        ends = [output_ids.index(t) for t in self.stop_token_ids if t in output_ids]
        return output_ids[: min(ends)] if ends else output_ids


class TemplateRenderer:
    """A model's own chat template, with a bridge where the template allows an exact one.

    The bridge renders the conversation with and without the new messages. If the shorter rendering is a
    prefix of the longer, and ends the reply with the end-of-turn token, then what follows that token is
    what the template puts between the turns, whatever the reply's ids are.
    """

    def __init__(self, inner: Any, eos: int | None) -> None:
        self._inner = inner
        self._eos = eos

    def render_ids(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self._inner.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None
    ) -> ParsedResponse:
        return self._inner.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self) -> list[int]:
        return self._inner.get_stop_token_ids()

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> None:
        return None

    def extension(
        self, conversation: list[dict[str, Any]], new_messages: list[dict[str, Any]], tools: Any
    ) -> list[int] | None:
        """Ids between the reply's end-of-turn token (not included) and the next reply, or None."""
        before = self.render_ids(conversation[:-1], tools=tools, add_generation_prompt=True)
        told = self.render_ids(conversation, tools=tools)
        asked = self.render_ids([*conversation, *new_messages], tools=tools, add_generation_prompt=True)
        if (
            asked[: len(told)] != told
            or told[: len(before)] != before
            or self._eos not in told[len(before) :]
        ):
            return None
        end = len(told) - 1 - told[::-1].index(self._eos)
        return asked[end + 1 :]


class TemplateTokens(Tokens):
    """Tokens of a model that is rendered by its own chat template."""

    bridges_whole = True

    def bridge(
        self,
        conversation: list[dict[str, Any]],
        prompt_ids: Sequence[int],
        output_ids: list[int],
        new_messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> list[int] | None:
        renderer, eos = self.renderer, self.stop_token_ids[:1]
        if not eos or not isinstance(renderer, TemplateRenderer):
            return None
        try:
            extension = renderer.extension(conversation, new_messages, tools or None)
        except Exception as e:  # a template raises its own types; without a rendering there is no bridge
            log.warning("the chat template failed to render %d new messages: %s", len(new_messages), e)
            return None
        if not extension:
            return None
        close = [] if output_ids[-1:] == eos else eos
        return close + extension


def _from_template(hf: Any, config: GatewayConfig, context: int, folder: Path) -> TemplateTokens:
    template = hf.chat_template
    if not template:
        raise ConfigError(
            f"the tokenizer in {folder} has no chat template and no known renderer; add chat_template.jinja, "
            "or set gateway.renderer to one of: " + ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
        )
    source = template if isinstance(template, str) else json.dumps(template)
    extra: dict[str, Any] = {"enable_thinking": config.enable_thinking} if "enable_thinking" in source else {}
    tools = "tools" in source
    hermes = tools and "<tool_call>" in hf.get_vocab() and "<tool_call>" in source
    inner = create_renderer(hf, DefaultRendererConfig(tool_parser="qwen3" if hermes else None, **extra))
    switched = "enable_thinking" in source
    syntax = ReplySyntax(
        known=switched or "<think>" not in source,
        json_calls=hermes,
        thinks=switched and config.enable_thinking,
        ids=_markup_ids(hf),
    )
    return TemplateTokens(
        TemplateRenderer(inner, hf.eos_token_id),
        hf,
        context=context,
        supports_tools=hermes,
        name="template",
        syntax=syntax,
    )


def _markup_ids(hf: Any) -> dict[str, int]:
    vocabulary = hf.get_vocab()
    return {t: vocabulary[t] for t in REPLY_MARKUP if t in vocabulary}


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as e:
        raise ConfigError(f"cannot read the model folder {folder}: {path.name}: {e}") from e
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} is no model configuration: it holds a {type(settings).__name__}")
    return settings


def _load_tokenizer(folder: Path) -> Any:
    """tokenizer.json as it is; `AutoTokenizer` only where there is none (it may rewrite pre-tokenizers)."""
    if not any(
        (folder / name).is_file() for name in TOKENIZER_FILES
    ):  # else the library invents an empty one
        raise ConfigError(f"there is no tokenizer in {folder}: none of {', '.join(TOKENIZER_FILES)}")
    # Each where it is needed: AutoTokenizer imports torch, for some seconds and 300 MB.
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as kind
    else:
        from transformers import AutoTokenizer as kind
    try:
        return kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as e:  # the library raises many types for one fact: this folder holds no tokenizer
        raise ConfigError(f"cannot load the tokenizer in {folder}: {e}") from e


def _context_length(settings: dict[str, Any], folder: Path) -> int:
    inner = settings.get("text_config")
    for where in (settings, inner if isinstance(inner, dict) else {}):
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            if isinstance(where.get(name), int):
                return where[name]
    raise ConfigError(f"{folder}/config.json names no context length; set fleet.max_model_len")


def _pick(settings: dict[str, Any], hf: Any, folder: Path) -> str:
    """The renderer's name: by model type and tokens, by the model's published name, else the template."""
    vocabulary = hf.get_vocab()
    if settings.get("model_type") in ("qwen3", "qwen3_moe") and all(t in vocabulary for t in QWEN3_TOKENS):
        return "qwen3"
    names = [str(settings.get("_name_or_path", "")), "/".join(folder.resolve().parts[-2:])]
    for name in names:
        if name in MODEL_RENDERER_MAP:
            return MODEL_RENDERER_MAP[name]
    return "template"
