"""What a request used, counted once: `usage` of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(cached_tokens, prompt_tokens)},
    }


def cached_tokens(per_choice: Sequence[int | None]) -> int:
    """Of one prompt: what was cached before this request, so the least that any of its choices found."""
    return min((cached for cached in per_choice if cached is not None), default=0)
