"""Ids equal transformers' own, for SmolLM2 and for templates with harder features."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gateway.kit.prompts import (
    NoChatTemplate,
    PromptsCatalogue,
    PromptsUnavailable,
    load_prompts,
)
from gateway.kit.templates import ChatTemplate, TemplateRefused

MODEL = Path(__file__).parents[3] / ".cache" / "smollm2-135m-instruct"
needs_model = pytest.mark.skipif(
    not (MODEL / "tokenizer.json").exists(), reason="SmolLM2 has not been made (make demo)"
)

CHATS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Naïve façade 🙂?"}],
    [
        {"role": "user", "content": "a\n\n  b\t<|im_end|>"},
        {"role": "assistant", "content": "你好"},
        {"role": "user", "content": ""},
    ],
]


@needs_model
def test_ids_equal_those_of_apply_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(MODEL)
    ours = load_prompts(str(MODEL))
    for messages in CHATS:
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert list(ours.encode_chat(messages)) == expected
        text = messages[-1]["content"]
        assert list(ours.encode(text)) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
        "{% for m in messages %}\n    {% if loop.index0 == 1 %}\n{% break %}\n{% endif %}"
        "{{ m | tojson }}\n{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}"
        "{%- endfor -%}{{ ns.n }} {{ strftime_now('%Y') }}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    ],
)
def test_templates_render_as_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{"role": "user", "content": " <b>é</b> "}, {"role": "assistant", "content": "x"}]
    rendered = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, **special
    )
    text = rendered[0] if isinstance(rendered, tuple) else rendered
    expected = text[0] if isinstance(text, list) else text
    assert ChatTemplate(source, special).render(messages) == expected


def test_a_template_refuses_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_cannot_leave_the_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(TemplateRefused):
        template.render([{"role": "user", "content": "x"}])


@needs_model
def test_bos_is_never_doubled_and_a_missing_template_is_named(tmp_path: Path) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    bos = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == "<|im_start|>")
    special = {"id": "<|im_start|>", "ids": [bos], "tokens": ["<|im_start|>"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": special},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<|im_start|>"}}')
    prompts = load_prompts(str(tmp_path))
    assert prompts.encode("Hi")[0] == bos
    assert prompts.encode("<|im_start|>Hi") == prompts.encode("Hi")
    with pytest.raises(NoChatTemplate):
        prompts.encode_chat([{"role": "user", "content": "x"}])


@needs_model
def test_token_bytes_join_to_the_text_even_where_a_token_is_part_of_a_character() -> None:
    prompts = load_prompts(str(MODEL))
    text = "Zürich 🙂 ok"
    assert b"".join(prompts.token_bytes(token) for token in prompts.encode(text)).decode() == text


async def test_a_source_is_loaded_once_and_a_bad_one_is_named(tmp_path: Path) -> None:
    catalogue = PromptsCatalogue()
    with pytest.raises(PromptsUnavailable, match=r"tokenizer\.json is missing"):
        await catalogue.of(str(tmp_path))
    if MODEL.exists():
        assert await catalogue.of(str(MODEL)) is await catalogue.of(str(MODEL))
