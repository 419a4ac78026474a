"""Chat templates as Hugging Face models bring them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.chat_template import ChatTemplate
from transport.errors import ConfigurationError, InvalidRequest

HELLO = [{"role": "user", "content": "<b>hi</b>"}]


def test_what_templates_expect_to_find() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n    {%- generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% if loop.first %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(HELLO) == '<s>{"role": "user", "content": "<b>hi</b>"}4'


def test_a_refusal_by_the_template_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequest, match="only users"):
        ChatTemplate("{{ raise_exception('only users') }}", {}).render(HELLO)
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages[0]['content'] + 1 }}", {}).render(HELLO)


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render(HELLO)
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages.append(1) }}", {}).render(HELLO)


def test_where_a_model_keeps_its_template(tmp_path: Path) -> None:
    assert ChatTemplate.of_model(tmp_path) is None
    config = {"eos_token": {"content": "</s>"}, "chat_template": [{"name": "default", "template": "A{{ eos_token }}"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.of_model(tmp_path).render(HELLO) == "A</s>"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("B{{ eos_token }}")
    assert ChatTemplate.of_model(tmp_path).render(HELLO) == "B</s>"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigurationError, match="does not parse"):
        ChatTemplate.of_model(tmp_path)
