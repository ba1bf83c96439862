"""Where a request would go now, and why, without sending it: what ``vllmctl route explain`` shows."""

from __future__ import annotations

from proxy.errors import ProxyError
from proxy.http.body import Body
from proxy.reading.request import read_body
from proxy.routes import Handler, Route, match
from proxy.routing import PolicyBook
from supervisord.control import ControlError, ErrorCode
from supervisord.core.admission import Admission, Explanation


def explain_route(admission: Admission, policies: PolicyBook, model: str, route: str, body: bytes) -> Explanation:
    """Of a request for ``model`` with ``body`` (JSON) at the path ``route``; raises ``ControlError``.

    Nothing is counted or remembered, nobody is woken, and the model that the body names does not matter.
    """
    found = _route(route)
    whole = Body(len(body))
    whole.append(body)
    try:
        facts = read_body(found, "application/json", whole).facts
    except ProxyError as error:
        raise ControlError(ErrorCode.INVALID_ARGUMENT, error.message) from None
    candidates = admission.candidates(model)
    if not candidates:
        return Explanation("", "no replica can have it now: it would wait until one is back, or be refused")
    return policies.policy(model).explain(facts, candidates)


def _route(path: str) -> Route:
    try:
        found = match("POST", path).route
    except ProxyError as error:
        raise ControlError(ErrorCode.INVALID_ARGUMENT, error.message) from None
    if found.handler is not Handler.ENGINE_JSON:
        raise ControlError(ErrorCode.INVALID_ARGUMENT, f"{path} takes no JSON that is routed by what it says")
    return found
