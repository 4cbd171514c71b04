"""Rendering and bridging, for models that are known and for models that only have a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gateway_support import CALCULATOR, build_model_folder

from areal_agent.config import GatewayConfig
from areal_agent.errors import ConfigError, GatewayError
from areal_gateway.tokens import TemplateTokens, Tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "What is two plus three?"}
REPLY = {"role": "assistant", "content": "five"}
NEXT = {"role": "user", "content": "Sure?"}


def test_a_qwen3_folder_gets_the_qwen3_renderer(tokens: Tokens) -> None:
    assert tokens.name == "qwen3"
    assert tokens.stop_token_ids


def test_the_fast_tokenizer_gives_transformers_ids(model_folder: Path, tokens: Tokens) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(model_folder)
    text = "<|im_start|>user\nnaïve 漢字 1234 <tool_call> x</tool_call><|im_end|>\n"
    assert tokens.tokenizer.encode(text) == hf.encode(text, add_special_tokens=False)
    assert tokens.text(tokens.tokenizer.encode(text)) == text


@pytest.mark.parametrize("thinking", [False, True])
def test_thinking_is_the_configs(model_folder: Path, thinking: bool) -> None:
    tokens = Tokens.load(model_folder, GatewayConfig(enable_thinking=thinking))
    text = tokens.text(tokens.render([USER], []))
    assert text.endswith("assistant\n" if thinking else "<think>\n\n</think>\n\n")


class TestTemplate:
    """A model that only has its own chat template."""

    @pytest.fixture
    def template(self, tmp_path: Path) -> Tokens:
        folder = build_model_folder(tmp_path / "m", chat_template=CHATML, model_type="llama")
        return Tokens.load(folder, GatewayConfig())

    def test_it_renders(self, template: Tokens) -> None:
        assert isinstance(template, TemplateTokens)
        ids = template.render([USER], [])
        assert template.text(ids) == f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"

    @pytest.mark.parametrize("ended", [True, False])
    def test_it_bridges_any_sampled_ids_exactly(self, template: Tokens, ended: bool) -> None:
        prompt = template.render([USER], [])
        odd = [i for c in "five" for i in template.tokenizer.encode(c, add_special_tokens=False)]
        output = odd + (template.stop_token_ids[:1] if ended else [])
        new = template.bridge([USER, REPLY], prompt, output, [NEXT], [])
        assert new is not None
        assert template.text(prompt + output + new) == template.text(template.render([USER, REPLY, NEXT], []))

    def test_it_refuses_where_the_template_rewrites_history(self, tmp_path: Path) -> None:
        folder = build_model_folder(tmp_path / "m", chat_template=FORGETFUL, model_type="llama")
        tokens = Tokens.load(folder, GatewayConfig())
        prompt = tokens.render([USER], [])
        output = tokens.tokenizer.encode("five", add_special_tokens=False) + tokens.stop_token_ids[:1]
        assert tokens.bridge([USER, REPLY], prompt, output, [NEXT], []) is None

    def test_tools_it_cannot_show_are_refused(self, template: Tokens) -> None:
        with pytest.raises(GatewayError, match="no tools") as e:
            template.render([USER], [CALCULATOR])
        assert e.value.status == 400


class TestUnusable:
    def test_no_template_and_no_renderer(self, tmp_path: Path) -> None:
        folder = build_model_folder(tmp_path / "m", model_type="llama")
        with pytest.raises(ConfigError, match="no chat template"):
            Tokens.load(folder, GatewayConfig())

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read the model folder"):
            Tokens.load(tmp_path / "nothing", GatewayConfig())

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "qwen3", "max_position_embeddings": 8})
        )
        with pytest.raises(ConfigError, match="no tokenizer"):
            Tokens.load(tmp_path, GatewayConfig())

    def test_no_context_length(self, model_folder: Path, tmp_path: Path) -> None:
        for f in model_folder.iterdir():
            (tmp_path / f.name).write_bytes(f.read_bytes())
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match="max_model_len"):
            Tokens.load(tmp_path, GatewayConfig())

    def test_an_unknown_renderer(self, model_folder: Path) -> None:
        with pytest.raises(ConfigError, match="magic"):
            Tokens.load(model_folder, GatewayConfig(renderer="magic"))
