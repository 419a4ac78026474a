"""Which request fields are honoured, which are accepted without effect, stripped, or refused by name.

A field is never silently changed: what is neither in the schema nor named here is refused, and what is known
to the OpenAI API or to vLLM but not implemented passes only with the value that means "off".
"""

from __future__ import annotations

from typing import Any

from transport.errors import InvalidRequest, UnsupportedParameter

#: accepted, without effect on the answer
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)

#: worker routing: only the router decides where a request runs, so a client's wish is dropped unread
STRIPPED = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disagg_prefill_dp_rank",
        "data_parallel_rank",
        "data_parallel_rank_decode",
    }
)

#: not implemented: field → the values that ask for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


def select(body: Any, honoured: frozenset[str]) -> dict[str, Any]:
    """The honoured fields of a request; null means absent. Raises InvalidRequest, UnsupportedParameter."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the request must be a JSON object, got {_kind(body)}")
    selected = {}
    for name, value in body.items():
        if value is None or name in HARMLESS or name in STRIPPED:
            if value is None and not _known(name, honoured):
                raise _unknown(name)
            continue
        if name in honoured:
            selected[name] = value
        elif name in UNSUPPORTED:
            if not any(_same(value, off) for off in UNSUPPORTED[name]):
                raise UnsupportedParameter(f"{name} is not supported here", param=name)
        else:
            raise _unknown(name)
    return selected


def _known(name: str, honoured: frozenset[str]) -> bool:
    return name in honoured or name in UNSUPPORTED or name in HARMLESS or name in STRIPPED


def _unknown(name: str) -> InvalidRequest:
    name = name[:64]
    return InvalidRequest(f"unknown field {name!r}", param=name)


def _same(value: Any, off: Any) -> bool:
    """Equal as JSON: 0 and 0.0 are, 0 and false are not."""
    return isinstance(value, bool) == isinstance(off, bool) and value == off


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        str: "a string",
        list: "an array",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)
