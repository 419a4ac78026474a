"""The cluster token: bearer header on HTTP and WebSocket, mutual HMAC proof on the data plane."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from transport.errors import AuthenticationFailed

NONCE_BYTES = 32
PROOF_BYTES = 32


def bearer(token: str) -> str:
    """Value of the Authorization header."""
    return f"Bearer {token}"


def check_bearer(header: str | None, token: str) -> None:
    """Raises AuthenticationFailed unless `header` carries `token`; takes the same time for any wrong token."""
    if not header:
        raise AuthenticationFailed("missing token: send `Authorization: Bearer <cluster token>`")
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(
        given.strip().encode("utf-8", "surrogateescape"), token.encode()
    ):
        raise AuthenticationFailed("wrong token")


def nonce() -> bytes:
    """A fresh challenge."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: str, side: str, *context: bytes) -> bytes:
    """HMAC-SHA256 that shows knowledge of the token without sending it.

    `side` differs between the two ends, so that a proof cannot be reflected; `context` is all that the proof
    vouches for (both nonces, names, generations), each part length-prefixed so that parts cannot be shifted.
    """
    mac = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for part in (side.encode(), *context):
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


def check_proof(given: bytes, token: str, side: str, *context: bytes) -> None:
    """Raises AuthenticationFailed unless `given` is `proof(token, side, *context)`."""
    if not hmac.compare_digest(given, proof(token, side, *context)):
        raise AuthenticationFailed("wrong token: the peer's proof does not match")
