"""/v1/realtime: a WebSocket from its handshake to a replica that has it, which is leased for as long as it is open.

vLLM's clients name the model after they have connected, in their first event (``session.update``), and many wait for
the server's greeting (``session.created``) before they say anything. So the greeting is ours, the first event decides,
and the engine's own greeting is dropped. OpenAI's clients name the model in the query: those get the engine's greeting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from proxy.attempts import Attempts
from proxy.errors import ProxyError
from proxy.exchange import ConnectFailed, Exchange, LocalFault, Outcome, Request, Stage, UpstreamBroken
from proxy.http.body import Body
from proxy.models import only_model
from proxy.policies.policy import Policy
from proxy.reading.facts import Facts
from proxy.reading.request import read_json
from proxy.realtime.early import Respell
from proxy.realtime.events import is_session_created, model_in_query, respelled, session_created
from proxy.realtime.session import Engine, EngineRefused, Session
from proxy.realtime.upgrade import answer_lines, check_handshake
from proxy.realtime.websocket import Message
from proxy.reply import Reply
from proxy.routes import Prompt, Route
from proxy.waiting import wait_for_replica
from supervisord.core.admission import Admission, Ending, Lease, Refuse, Wait
from supervisord.core.spec import ProxySpec


class Sockets(Protocol):
    """The way to the engines."""

    async def session(self, lease: Lease, exchange: Exchange, target: str) -> tuple[Engine, Message]:
        """Shake hands with the lease's replica, for ``target``; returns it with its first message.

        Raises ``ConnectFailed``, ``EngineRefused`` or ``LocalFault``. Cancelling cuts the connection.
        """
        ...


class Realtime:
    """Serves the route. ``clock`` is monotonic, seconds."""

    def __init__(self, admission: Admission, attempts: Attempts, sockets: Sockets, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._attempts = attempts
        self._sockets = sockets
        self._clock = clock

    async def serve(
        self,
        request: Request,
        route: Route,
        reply: Reply,
        outcome: Outcome,
        request_id: str,
        spec: ProxySpec,
        policy_of: Callable[[str], Policy],
    ) -> None:
        """One session from its handshake to its end; raises ``ProxyError`` and ``ClientGone``."""
        check_handshake(request.head, spec.cors_origins)
        asked = model_in_query(request.head.target)
        session = Session(request, reply, outcome, idle_timeout=spec.realtime_idle_timeout)

        async def work() -> None:
            model = asked or await self._first_named(request, session)
            outcome.model, outcome.stream = model, True
            facts = Facts(model)
            exchange = Exchange(request_id, route, request.head, Body(0), False, facts, model, None, outcome)
            policy = policy_of(model)
            visit = _Visit(exchange, session, reply, policy, asked)
            await self._attempts.run(
                exchange, policy, lambda wait: self._wait(wait, visit), lambda lease: self._attempt(lease, visit)
            )

        await session.carry(work())

    async def _first_named(self, request: Request, session: Session) -> str:
        """Greet the client, and hear what model it wants."""
        session.open(answer_lines(request.head), read_first=True)
        session.say(session_created())
        event = await session.first_event()
        try:
            model = read_json(event, Prompt.NONE).facts.model or only_model(self._admission.listing())
        except ProxyError:
            message = "the first event must be a JSON object, and its model a text"
            raise ProxyError(400, "invalid_event", message) from None
        if model is None:
            message = "the first event must be a session.update that names a model: there are several here"
            raise ProxyError(400, "invalid_event", message, param="model")
        return model

    async def _wait(self, wait: Wait, visit: _Visit) -> Lease | Refuse:
        session = visit.session
        try:
            if not session.opened:  # a client gives up on a handshake after some seconds, and a wake takes more
                session.open(answer_lines(visit.exchange.head))
        except BaseException:
            self._admission.abandon(wait)
            raise
        session.waiting = True
        try:
            return await wait_for_replica(self._admission, wait, visit.reply, None)
        finally:
            session.waiting = False

    async def _attempt(self, lease: Lease, visit: _Visit) -> str | None:
        """Use up one lease; returns why another replica should have the session, None when it is over."""
        exchange, session = visit.exchange, visit.session
        outcome = exchange.outcome
        outcome.model, outcome.replica, outcome.reason = lease.model, lease.replica, lease.reason
        outcome.placement, outcome.stage = lease.placement, Stage.PREFILL
        outcome.attempts += 1
        ending, detail = Ending.CLIENT_GONE, ""
        try:
            engine, greeting = await self._sockets.session(lease, exchange, visit.target(lease))
            try:
                outcome.first_byte, outcome.stage = self._clock(), Stage.STREAM
                visit.policy.first_byte(exchange.facts)
                if not session.opened:
                    session.open(answer_lines(exchange.head) + (_served_by(lease) if visit.reply.tells_route else b""))
                await session.run(engine, visit.greeting(greeting), self._respell(lease))
                ending = Ending.COMPLETED
            finally:
                engine.cut()
        except ConnectFailed as failure:
            ending, detail = Ending.CONNECT_FAILED, str(failure)
            return detail
        except EngineRefused as failure:
            ending = Ending.COMPLETED
            raise _refused(lease, failure) from None
        except UpstreamBroken as failure:
            ending, detail = Ending.STREAM_BROKEN, str(failure)
            raise ProxyError(502, "upstream_failed", f"replica {lease.replica}: {failure}") from None
        except LocalFault as failure:
            detail = str(failure)
            raise ProxyError(503, "out_of_resources", str(failure), retry_after=1.0) from None
        finally:
            self._admission.finish(lease, ending, detail)
        return None

    def _respell(self, lease: Lease) -> Respell | None:
        """How the model must be named to the replica; None where it answers to every name that clients may use."""
        served = lease.served_names
        models = [model for model in self._admission.listing() if model.name == lease.model]
        names = {lease.model}.union(*(model.aliases for model in models))
        if not served or names <= set(served):
            return None

        def respell(event: bytes) -> bytes | None:
            try:
                read = read_json(event, Prompt.NONE)
            except ProxyError:
                return None
            if read.model_name is None:
                return None
            if read.facts.model not in names or read.facts.model in served:
                return event
            splice = read.model_name.replaced_by(served[0])
            return event[: splice.start] + splice.replacement + event[splice.end :]

        return respell


class _Visit:
    """What stays the same while a session goes from replica to replica. ``asked``: the model that its query names."""

    def __init__(self, exchange: Exchange, session: Session, reply: Reply, policy: Policy, asked: str | None) -> None:
        self.exchange, self.session, self.reply, self.policy = exchange, session, reply, policy
        self._asked = asked

    def target(self, lease: Lease) -> str:
        """The request target for a replica, with a name that it answers to."""
        target = self.exchange.head.target
        if self._asked is None or not lease.served_names or self._asked in lease.served_names:
            return target
        return respelled(target, lease.served_names[0])

    def greeting(self, first: Message) -> bytes:
        """What the client gets of the engine's first message: not a second greeting."""
        return b"" if self._asked is None and is_session_created(first.payload) else first.raw


def _served_by(lease: Lease) -> bytes:
    return f"x-vllmctl-replica: {lease.replica}\r\nx-vllmctl-route: {lease.reason}\r\n".encode("latin-1", "replace")


def _refused(lease: Lease, failure: EngineRefused) -> ProxyError:
    # vLLM has the route only where the model can do it; a WebSocket without a route is answered 403.
    why = " (a model without realtime transcription has no such route)" if failure.status == 403 else ""
    status = failure.status if 400 <= failure.status < 500 else 502
    return ProxyError(status, "engine_refused", f"replica {lease.replica} answered {failure} to the handshake{why}")
