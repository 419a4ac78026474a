"""The cluster token: bearer headers and data-plane proofs."""

from __future__ import annotations

import pytest

from transport.auth import bearer, check_bearer, check_proof, nonce, proof
from transport.errors import AuthenticationFailed


@pytest.mark.parametrize("header", [bearer("token"), "bearer token", "Bearer  token "])
def test_the_token_is_accepted(header: str) -> None:
    check_bearer(header, "token")


@pytest.mark.parametrize(
    "header", [None, "", "token", "Bearer", "Bearer ", "Bearer tokens", "Bearer toke", "Basic token", "Bearer tökén"]
)
def test_anything_else_is_refused_without_the_token_in_the_message(header: str | None) -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        check_bearer(header, "s3cret")
    assert "s3cret" not in str(caught.value)


def test_a_proof_vouches_for_side_and_context() -> None:
    first, second = nonce(), nonce()
    assert first != second
    given = proof("token", "writer", first, b"name")
    check_proof(given, "token", "writer", first, b"name")
    for token, side, context in [
        ("other", "writer", (first, b"name")),
        ("token", "receiver", (first, b"name")),
        ("token", "writer", (second, b"name")),
        ("token", "writer", (first + b"n", b"ame")),
        ("token", "writer", (first,)),
    ]:
        with pytest.raises(AuthenticationFailed):
            check_proof(given, token, side, *context)
