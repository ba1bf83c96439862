"""What each route of the allow-list does: answered here from what is known, or read and given to the relay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from functools import partial
from typing import Any

from proxy.clients.cors import Cors
from proxy.clients.forwarded import Forwarded, forwarded_fields
from proxy.clients.intake import receive_body
from proxy.errors import ProxyError, bad_request
from proxy.exchange import Exchange, Outcome, Request
from proxy.http import origins as pages
from proxy.models import model_entry, model_list, model_with_adapter, only_model
from proxy.policies.policy import Policy
from proxy.reading.facts import Facts
from proxy.reading.request import read_body
from proxy.realtime.endpoint import Realtime
from proxy.relay import Relay
from proxy.reply import Reply
from proxy.routes import Handler, Match, Prompt, Route
from proxy.routing import PolicyBook, UnknownPolicy
from proxy.stored import StoredResponses, stored_exchange
from supervisord.core.admission import Admission
from supervisord.core.spec import ProxySpec

#: Bytes of an upload that stay in memory; a larger one goes to a temporary file.
SPOOL_AFTER = 1024 * 1024

#: With it a client has one request routed by another policy than the model's own: vllmctl bench routing measures so.
ROUTING_HEADER = "x-vllmctl-routing"

_NO_CONTENT = [("Content-Type", "text/plain")]
_JSON = [("Content-Type", "application/json")]


class Service:
    """Answers matched requests. ``spec`` is as it was configured last."""

    def __init__(
        self,
        admission: Admission,
        spec: ProxySpec,
        policies: PolicyBook,
        relay: Relay,
        realtime: Realtime,
        stored: StoredResponses,
    ) -> None:
        self.configure(spec)
        self._admission = admission
        self._policies = policies
        self._relay = relay
        self._realtime = realtime
        self._stored = stored

    def configure(self, spec: ProxySpec) -> None:
        """Take a new configuration."""
        self.spec = spec
        self._cors = Cors(spec.cors_origins) if spec.cors_origins else None
        self._told = "" if spec.forwarded == Forwarded.OFF else spec.forwarded

    def prepare(self, request: Request, reply: Reply) -> None:
        """What every answer has, an error too, and every request for an engine."""
        reply.tells_route = self.spec.route_headers
        if self._cors is not None:
            reply.lines = self._cors.lines(request.head)
        if self._told:
            head = request.head
            told = forwarded_fields(self._told, request.peer, request.host, secure=request.secure)
            head.passing += tuple(told)

    def answer(
        self, request: Request, match: Match, reply: Reply, outcome: Outcome, request_id: str
    ) -> Coroutine[Any, Any, None]:
        """What answers one request; raises ``ProxyError`` where the answer is an error, and ``ClientGone``."""
        head = request.head
        if head.content_type != "application/json" and head.method == "POST" and not outcome.key:
            self._check_page(request)
        if match.route.handler is Handler.ENGINE_JSON and not match.options:  # nearly all of them
            return self._forward(request, match.route, reply, outcome, request_id)
        return self._answer(request, match, reply, outcome, request_id)

    def _check_page(self, request: Request) -> None:
        if not pages.goes_unasked(request.head):
            return
        origin, host = (value.decode("latin-1") for value in (request.head.field(b"origin"), request.host))
        if not pages.may(origin, (host,), self.spec.cors_origins):
            raise ProxyError(403, "origin_not_allowed", f"pages of {origin[:200]!r} may not use this port")

    async def _answer(self, request: Request, match: Match, reply: Reply, outcome: Outcome, request_id: str) -> None:
        if match.options:
            headers = [("Allow", match.route.allow)]
            if self._cors is not None:
                headers += self._cors.preflight(request.head, match.route.allow)
            await reply.answer(204, headers, b"")
            return
        match match.route.handler:
            case Handler.ENGINE_JSON | Handler.ENGINE_FORM:
                await self._forward(request, match.route, reply, outcome, request_id)
            case Handler.HEALTH:
                await reply.answer(200, _NO_CONTENT, b"")
            case Handler.MODELS:
                await reply.answer(200, _JSON, json.dumps(model_list(self._admission.listing())).encode())
            case Handler.MODEL:
                entry = model_entry(self._admission.listing(), match.argument)
                await reply.answer(200, _JSON, json.dumps(entry).encode())
            case Handler.REALTIME:
                policy_of = partial(self._routed, request)
                await self._realtime.serve(request, match.route, reply, outcome, request_id, self.spec, policy_of)
            case Handler.STORED:
                await self._ask_for_stored(request, match, reply, outcome, request_id)

    async def _forward(self, request: Request, route: Route, reply: Reply, outcome: Outcome, request_id: str) -> None:
        spool_after = SPOOL_AFTER if route.handler is Handler.ENGINE_FORM else None
        body, decoded = await receive_body(request, self.spec, spool_after)
        try:
            content_type = request.head.content_type
            if body.spooled:  # looking through a file takes its time
                read = await asyncio.to_thread(read_body, route, content_type, body)
            else:
                read = read_body(route, content_type, body)
            facts = read.facts
            model = facts.model or only_model(self._admission.listing())
            if model is None:
                raise bad_request("the request names no model, and there are several", param="model")
            routed = model
            if not self._policies.knows(model):
                facts, routed = self._adapted(facts, model)
            outcome.model, outcome.stream, outcome.bytes_received = model, facts.stream, body.size
            exchange = Exchange(
                id=request_id,
                route=route,
                head=request.head,
                body=body,
                decoded=decoded,
                facts=facts,
                model=model,
                model_name=read.model_name,
                outcome=outcome,
            )
            if route.prompt is Prompt.RESPONSES:
                exchange.learn = self._stored.learner(exchange)
                if facts.previous and (owner := await self._stored.find(facts.previous, exchange)) is not None:
                    exchange.only = frozenset({owner.replica}) if owner.model == self._policies.model(routed) else None
            await self._relay.run(exchange, reply, self._policy(request, routed), self.spec.wait_comment_after)
        finally:
            body.close()

    async def _ask_for_stored(
        self, request: Request, match: Match, reply: Reply, outcome: Outcome, request_id: str
    ) -> None:
        body, decoded = await receive_body(request, self.spec, None)
        try:
            exchange = stored_exchange(request_id, match.route, request.head, body, outcome, decoded=decoded)
            await self._stored.answer(match.argument, exchange, reply)
        finally:
            body.close()

    def _adapted(self, facts: Facts, model: str) -> tuple[Facts, str]:
        """The facts as they are for routing, and the model whose policy routes: an adapter's is that of its model."""
        if self._policies.knows(model):
            return facts, model
        parent = model_with_adapter(self._admission.listing(), model)
        return (facts, model) if parent is None else (facts.with_adapter(model), parent)

    def _routed(self, request: Request, model: str) -> Policy:
        return self._policy(request, self._adapted(Facts(model), model)[1])

    def _policy(self, request: Request, model: str) -> Policy:
        try:
            return self._policies.policy(model, request.head.routing)
        except UnknownPolicy as error:
            raise bad_request(str(error), param=ROUTING_HEADER) from None
