"""What the dialects share: bodies, errors, usage, and the two ways to answer (whole, or as a stream of events)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import struct
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from aiohttp import WSCloseCode, web

from supervisord.simulator.clock import Clock
from supervisord.simulator.engine import Engine
from supervisord.simulator.faults import Faults
from supervisord.simulator.generation import EngineDead, Generation, Output, ShutDown, Work
from supervisord.simulator.options import Options
from supervisord.simulator.tokens import count

Body = dict[str, Any]


class ApiError(Exception):
    """vLLM's error object; on the Anthropic route Anthropic's, unless it was found before the route's own code."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        param: str | None = None,
        *,
        in_validation: bool = False,
        retry_after: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param
        self.in_validation, self.retry_after = in_validation, retry_after

    def body(self) -> Body:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


def internal_error(error: Exception) -> ApiError:
    return ApiError(500, "InternalServerError", str(error))


class Frames(Protocol):
    """One dialect's stream: each method returns whole server-sent events."""

    def open(self) -> Iterable[str]:
        """Sent with the first output, not before: while asleep a stream is headers and nothing more."""
        ...

    def piece(self, output: Output) -> Iterable[str]: ...

    def close(self) -> Iterable[str]: ...

    def failed(self, message: str) -> Iterable[str]: ...


def event(data: Body, name: str = "") -> str:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"


class Api:
    """One engine behind HTTP."""

    def __init__(self, options: Options, engine: Engine, faults: Faults, clock: Clock) -> None:
        self.options, self.engine, self.faults, self.clock = options, engine, faults, clock
        #: Requests being handled, of any route; set while there are none.
        self.handling = 0
        self.quiet = asyncio.Event()
        self.quiet.set()
        #: Realtime sessions that are open.
        self.sessions: set[web.WebSocketResponse] = set()

    # --- the way in -----------------------------------------------------------------------------------------------

    async def json_body(self, request: web.Request) -> Body:
        """The JSON object of an inference request; 400 for anything else. Faults of any request strike here."""
        raw = await request.read()
        await self.arrived(request, raw)
        if request.content_type != "application/json":
            text = "[\"Unsupported Media Type: Only 'application/json' is allowed\"]"
            raise ApiError(400, "Bad Request", text, in_validation=True)
        return parse_json(raw)

    async def arrived(self, request: web.Request, raw: bytes) -> None:
        """Book an inference request, and let the faults that wait for one strike."""
        self.engine.counters.seen.append(
            {
                "method": request.method,
                "path": request.path_qs,
                "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.raw_headers],
                "body_bytes": len(raw),
                "body_sha256": hashlib.sha256(raw).hexdigest(),
            }
        )
        for status, kind in ((500, "InternalServerError"), (503, "ServiceUnavailableError"), (429, "RateLimitError")):
            fault = self.faults.take(str(status))
            if fault:
                raise ApiError(status, kind, f"simulated {status}", retry_after=fault.arg)
        slow = self.faults.take("slow-headers")
        if slow:
            await self.clock.sleep(float(slow.arg or 1.0))
        reset = self.faults.armed("reset-mid-stream")
        if reset and reset.arg == "0":
            self.faults.take("reset-mid-stream")
            reset_connection(request)
        self.engine.strike_at("request")

    def model_of(self, body: Mapping[str, Any]) -> str:
        """The model's name to echo: the one asked for, or the first served where none is. 404 for an unknown one."""
        name = body.get("model")
        if name is None or name == "":
            return self.options.served_names[0]
        if name not in self.options.served_names and name not in dict(self.options.adapters):
            raise ApiError(404, "NotFoundError", f"The model `{name}` does not exist.", "model")
        return str(name)

    def limit(self, prompt: bytes, asked: Any, param: str = "max_tokens") -> int:
        """How many tokens an answer may have; 400 where prompt and answer do not fit the context."""
        most, used = self.options.max_model_len, count(prompt)
        if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
            raise bad_request(f"{param} must be at least 1, got {asked}.", param)
        if used >= most:
            raise bad_request(
                f"This model's maximum context length is {most} tokens. However, your request has {used} input tokens. "
                "Please reduce the length of the input messages.",
                "input_tokens",
            )
        if asked is not None and used + asked > most:
            raise bad_request(
                f"'{param}' is too large: {asked}. This model's maximum context length is {most} tokens and your "
                f"request has {used} input tokens ({asked} > {most} - {used}).",
                param,
            )
        return int(asked) if asked is not None else most - used

    def request_id(self, request: web.Request, prefix: str) -> str:
        """``chatcmpl-`` and the client's X-Request-Id, or a random one."""
        return f"{prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"

    async def close_sessions(self) -> None:
        """Say goodbye to realtime sessions, as uvicorn does at its end."""
        for session in list(self.sessions):
            with suppress(ConnectionError):
                await session.close(code=WSCloseCode.SERVICE_RESTART)

    # --- the way out ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def generating(self, request_id: str, work: Work) -> AsyncIterator[Generation]:
        """A request in the engine; however the block ends, the engine does not go on computing for it."""
        try:
            generation = self.engine.submit(request_id, work)
        except (EngineDead, ShutDown) as error:
            raise internal_error(error) from None
        try:
            yield generation
        finally:
            self.engine.leave(generation)

    async def collect(self, generation: Generation) -> str:
        """Wait for the whole answer (in ``generation.text``); returns the finish reason."""
        reason = "stop"
        try:
            async for output in generation:
                reason = output.finish or reason
        except EngineDead as error:
            raise internal_error(error) from None
        return reason

    async def stream(self, request: web.Request, generation: Generation, frames: Frames) -> web.StreamResponse:
        """Answer as server-sent events. The 200 and its headers go out before the engine does anything."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        reset = self.faults.take("reset-mid-stream")
        await response.prepare(request)
        sent = 0
        with suppress(ConnectionError):  # the client left between two chunks
            async for frame in self.events(generation, frames):
                if reset and sent >= int(reset.arg or 1):
                    reset_connection(request)
                await response.write(frame.encode())
                sent += 1
                self.engine.strike_at(f"chunk:{sent}")
            await response.write_eof()
        return response

    async def events(self, generation: Generation, frames: Frames) -> AsyncIterator[str]:
        """The server-sent events of an answer as they come."""
        first = True
        try:
            async for output in generation:
                if first:
                    first = False
                    for frame in frames.open():
                        yield frame
                for frame in frames.piece(output):
                    yield frame
        except EngineDead as error:
            for frame in frames.failed(str(error)):
                yield frame
            return
        for frame in frames.close():
            yield frame

    def usage(self, generation: Generation) -> Body:
        """OpenAI's usage object."""
        prompt, produced = generation.seq.prompt_tokens, generation.seq.produced
        details = {"cached_tokens": generation.seq.cached} if self.options.prompt_tokens_details else None
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + produced,
            "completion_tokens": produced,
            "prompt_tokens_details": details,
        }


def parse_json(raw: bytes) -> Body:
    """The JSON object in ``raw``; FastAPI's 400 otherwise."""
    try:
        body = json.loads(raw)
    except (ValueError, UnicodeDecodeError) as error:
        raise ApiError(400, "Bad Request", f"JSON decode error: {error}", in_validation=True) from None
    if not isinstance(body, dict):
        raise ApiError(400, "Bad Request", "Input should be a valid dictionary", in_validation=True)
    return body


def required(body: Mapping[str, Any], name: str) -> Any:
    """A field that must be there (FastAPI's validation: 400 in the OpenAI shape on every route)."""
    if body.get(name) is None:
        raise ApiError(400, "Bad Request", f"Field required: {name}", name, in_validation=True)
    return body[name]


def reset_connection(request: web.Request) -> None:
    """Answer with a TCP RST (on a Unix socket: a sudden end), and end the handler."""
    transport = request.transport
    if transport is not None:
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()
    raise asyncio.CancelledError("simulated reset")


def now() -> int:
    return int(time.time())
