"""The model's own chat template: Jinja in a sandbox, with what Hugging Face templates expect to find."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transport.errors import ConfigurationError, InvalidRequest


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigurationError where the template does not parse."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigurationError(f"the model's chat template does not parse: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def of_model(cls, model_dir: Path) -> ChatTemplate | None:
        """The template beside the model's tokenizer; None where the model has none (a base model)."""
        config = tokenizer_config(model_dir)
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if (model_dir / "chat_template.jinja").is_file():
            source = (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
        return None if source is None else cls(source, _special_tokens(config))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text, up to where the assistant begins. Raises InvalidRequest where the template refuses."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error


def tokenizer_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
