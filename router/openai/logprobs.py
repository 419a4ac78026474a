"""Log-probabilities in the two shapes of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.openai.choice import TokenLogprob
from router.tokenizer import Tokenizer

#: JSON has no -inf; vLLM shows the same number
LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text, data = tokenizer.token_text(token_id)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data)}

    return {
        "content": [
            shown(position.entry.token, position.entry.logprob)
            | {"top_logprobs": [shown(token_id, logprob) for token_id, logprob in position.entry.top]}
            for position in positions
        ]
    }


def completion_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; the chosen token is always among its `top_logprobs`."""
    tokens, values, tops = [], [], []
    for position in positions:
        entry = position.entry
        text = tokenizer.token_text(entry.token)[0]
        tokens.append(text)
        values.append(max(entry.logprob, LEAST))
        top = {tokenizer.token_text(token_id)[0]: max(logprob, LEAST) for token_id, logprob in entry.top}
        tops.append(top | {text: max(entry.logprob, LEAST)})
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": [position.offset for position in positions],
    }
