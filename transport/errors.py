"""The one error hierarchy: each error knows the HTTP status it becomes and whether another try may help.

Errors cross process boundaries as `ErrorInfo` (see `transport.messages`) and come back as the same class
by their `code`.
"""

from __future__ import annotations

from typing import ClassVar


class HawkError(Exception):
    """Base of all errors that Hawk raises on purpose.

    `status` is the HTTP status at the front door, `code` the stable machine-readable name, `type` the
    OpenAI error type, `retryable` whether the router may try the request again (on another worker) as
    long as no token of it has been sent. `param` names the offending request field, if there is one.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


# ---- the client's fault: never retried, never counted against a worker ------------------------------


class InvalidRequest(HawkError):
    """A field has a wrong type or value."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class UnsupportedParameter(InvalidRequest):
    """A field is known to the OpenAI API but not implemented here."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt plus max_tokens, does not fit the model's context or a worker's pool."""

    code = "context_length_exceeded"


class AuthenticationFailed(HawkError):
    """A token is missing or wrong."""

    status = 401
    code = "authentication_failed"
    type = "authentication_error"


class ModelNotFound(HawkError):
    """The named model is not served here."""

    status = 404
    code = "model_not_found"
    type = "invalid_request_error"


class PayloadTooLarge(HawkError):
    """The request body is over the configured limit."""

    status = 413
    code = "payload_too_large"
    type = "invalid_request_error"


class BodyTimeout(HawkError):
    """The request body did not arrive in time."""

    status = 408
    code = "body_timeout"
    type = "invalid_request_error"


# ---- a worker or the wire: retried within a budget ---------------------------------------------------


class Overloaded(HawkError):
    """No room now: a queue or a pool is full."""

    status = 503
    code = "overloaded"
    type = "overloaded_error"
    retryable = True


class NoWorkers(Overloaded):
    """No prefill/decode pair is ready."""

    code = "no_workers"


class WorkerLost(HawkError):
    """A worker's session broke or its process died while it held the request."""

    status = 502
    code = "worker_lost"
    retryable = True


class PushFailed(HawkError):
    """The KV transfer from prefill to decode failed; the message says why."""

    status = 502
    code = "push_failed"
    retryable = True


class ChecksumMismatch(HawkError):
    """What lies in the decode worker's memory is not what the prefill worker sent."""

    status = 502
    code = "checksum_mismatch"
    retryable = True


class LeaseRevoked(HawkError):
    """The lease was fenced, freed or is unknown: its writer must stop."""

    status = 409
    code = "lease_revoked"
    retryable = True


class LeaseExpired(LeaseRevoked):
    """The lease's time to live ran out before it was used."""

    status = 504
    code = "lease_expired"


class StaleGeneration(HawkError):
    """A message or a write belongs to an earlier life of a process."""

    status = 409
    code = "stale_generation"
    retryable = True


class UnknownPool(HawkError):
    """A lease names a decode worker whose pool this prefill worker has not accepted."""

    status = 409
    code = "unknown_pool"
    retryable = True


class GeometryMismatch(HawkError):
    """Two workers cannot exchange KV: models, head counts or dtypes do not fit."""

    status = 409
    code = "geometry_mismatch"


class RequestTimeout(HawkError):
    """The request took longer than its limit."""

    status = 504
    code = "timeout"
    type = "timeout_error"


class EngineFailed(HawkError):
    """The model engine failed; the worker is not ready any more."""

    status = 500
    code = "engine_failed"
    retryable = True


class Preempted(HawkError):
    """A decode was preempted more often than the limit allows."""

    status = 503
    code = "preempted"
    type = "overloaded_error"


class ProtocolError(HawkError):
    """A peer sent something the protocol does not allow."""

    status = 502
    code = "protocol_error"


class ConfigurationError(HawkError):
    """A setting is unknown, contradictory or cannot be met; raised at start."""

    code = "configuration_error"


def _tree(cls: type[HawkError]) -> dict[str, type[HawkError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


def from_code(code: str, message: str, *, param: str | None = None) -> HawkError:
    """The error that `code` names; an unknown code becomes a plain `HawkError` that keeps the message."""
    return _tree(HawkError).get(code, HawkError)(message, param=param)
