"""What a reservation must satisfy whatever the load: otherwise it is refused for good."""

from __future__ import annotations

from transport.errors import ContextLengthExceeded, InvalidRequest, ProtocolError
from transport.messages import Reserve


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def check(request: Reserve, block_size: int, max_model_len: int, total_blocks: int) -> None:
    """Raises ContextLengthExceeded where the request can never fit, InvalidRequest where there is nothing to
    decode, ProtocolError where prompt and hashes disagree."""
    if request.max_tokens < 2:
        raise InvalidRequest("max_tokens of a reservation must be at least 2: the first token is prefill's")
    full, tail = divmod(request.prompt_tokens, block_size)
    given = (len(request.block_hashes), len(request.tail_tokens))
    if given not in ((full, tail), (0, 0)):
        raise ProtocolError(
            f"{request.prompt_tokens} prompt tokens make {full} block hashes and {tail} tail tokens, got {given}"
        )
    asked = f"{request.prompt_tokens} prompt tokens and max_tokens {request.max_tokens}"
    total = request.prompt_tokens + request.max_tokens
    if total > max_model_len:
        raise ContextLengthExceeded(f"{asked} exceed the context of {max_model_len} tokens")
    # The last token is never cached.
    if (blocks := blocks_for(total - 1, block_size)) > total_blocks:
        raise ContextLengthExceeded(f"{asked} need {blocks} KV blocks, the decode worker's pool has {total_blocks}")
