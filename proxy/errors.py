"""Every refusal, in the shape that the client's library understands, with a code and Retry-After where waiting helps.

OpenAI's shape is ``{"error": {"message", "type", "param", "code"}}`` (vLLM's too); Anthropic's, on /v1/messages, is
``{"type": "error", "error": {"type", "message"}}``. In a stream that has begun the same object is an SSE event.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum

from supervisord.core.admission import RefusalCode, Refuse


class Dialect(StrEnum):
    """Which client library reads the answers of a route."""

    OPENAI = "openai"
    RESPONSES = "responses"  # OpenAI's, but its stream has named events
    ANTHROPIC = "anthropic"


# vLLM names its errors so; those that it never answers follow the pattern.
_OPENAI_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    414: "URITooLongError",
    415: "UnsupportedMediaTypeError",
    417: "ExpectationFailedError",
    426: "UpgradeRequiredError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

# https://docs.anthropic.com/en/api/errors; overloaded_error is the one that its clients retry.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ProxyError(Exception):
    """An answer of ours instead of an engine's. ``retry_after`` is seconds; None where waiting does not help."""

    def __init__(
        self,
        status: int,
        code: str | int,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        kind: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after, self.headers = param, retry_after, headers
        #: The error's type, where it is not what the status says.
        self.kind = kind


def bad_request(message: str, *, param: str | None = None) -> ProxyError:
    """400 as vLLM words it: its ``code`` is the number."""
    return ProxyError(400, 400, message, param=param)


def refused(refusal: Refuse) -> ProxyError:
    """The supervisor's refusal as an answer: 404 for an unknown model, else 503."""
    if refusal.code is RefusalCode.MODEL_NOT_FOUND:
        return ProxyError(404, refusal.code.value, refusal.message, param="model")
    return ProxyError(503, refusal.code.value, refusal.message, retry_after=refusal.retry_after)


def error_body(error: ProxyError, dialect: Dialect) -> bytes:
    """The JSON body of an error answer."""
    return json.dumps(_error_object(error, dialect)).encode()


def error_headers(error: ProxyError) -> list[tuple[str, str]]:
    """The headers that belong to an error answer (its length is the caller's)."""
    headers = [("Content-Type", "application/json"), *error.headers]
    if error.retry_after is not None:
        # delay-seconds is a whole number (RFC 9110 10.2.3); 0 would invite a spin.
        headers.append(("Retry-After", str(max(1, math.ceil(error.retry_after)))))
    return headers


def error_event(error: ProxyError, dialect: Dialect) -> bytes:
    """The SSE event that ends a stream which cannot go on. No ``[DONE]`` follows: that would say it was whole."""
    return _event(_error_object(error, dialect), dialect)


def engine_error_event(status: int, body: bytes, dialect: Dialect) -> bytes:
    """An engine's error answer for a client that already got our 200: its own error object where it sent one."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and answer.get("error"):
        return _event(answer, dialect)
    text = body[:500].decode("utf-8", "replace")
    return error_event(ProxyError(502, status, f"the engine answered {status}: {text}".rstrip(": ")), dialect)


def _error_object(error: ProxyError, dialect: Dialect) -> dict[str, object]:
    if dialect is Dialect.ANTHROPIC:
        fallback = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(error.status, fallback)
        return {"type": "error", "error": {"type": kind, "message": error.message, "code": error.code}}
    usual = _OPENAI_TYPES.get(error.status, "BadRequestError" if error.status < 500 else "InternalServerError")
    kind = error.kind or usual
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _event(answer: dict[str, object], dialect: Dialect) -> bytes:
    if dialect is Dialect.OPENAI:
        return b"data: " + json.dumps(answer).encode() + b"\n\n"
    if dialect is Dialect.RESPONSES:
        # Its event is flat; the nested object stays, because the client library raises only when it finds one.
        inner = answer["error"] if isinstance(answer["error"], dict) else {}
        flat = {"type": "error", "sequence_number": 0, **{k: inner.get(k) for k in ("code", "message", "param")}}
        answer = {**flat, **answer}
    return b"event: error\ndata: " + json.dumps(answer).encode() + b"\n\n"
