"""/v1/realtime: a WebSocket on which audio comes in pieces and text goes back, as vLLM 0.32 was seen to do it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import WSMsgType, web

from supervisord.simulator.api import Api, ApiError, now
from supervisord.simulator.audio import BYTES_PER_AUDIO_TOKEN
from supervisord.simulator.generation import EngineDead, Work

#: uvicorn's: the longest message, and how often it pings. Real seconds, for they are the server's and not the engine's.
MOST_MESSAGE = 16 * 1024 * 1024
PING_EVERY = 20.0
#: Real seconds that a client has to answer a Close.
CLOSE_PATIENCE = 1.0
#: Bytes of 16 kHz, 16 bit sound for a token of text: 80 ms.
BYTES_PER_TEXT_TOKEN = 2560


def routes(api: Api) -> list[web.RouteDef]:
    """The one route; only engines that generate have it."""

    async def realtime(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            max_msg_size=MOST_MESSAGE, heartbeat=PING_EVERY, timeout=CLOSE_PATIENCE, autoping=True
        )
        if not socket.can_prepare(request):
            raise web.HTTPNotFound
        await api.arrived(request, b"")
        await socket.prepare(request)
        api.sessions.add(socket)
        try:
            await Session(api, socket).run()
        finally:
            api.sessions.discard(socket)
        return socket

    return [web.get("/v1/realtime", realtime, allow_head=False)]


class EventError(Exception):
    """An event that vLLM answers with an error event; the session goes on. ``code``: vLLM's own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """One connection: its audio, and the transcription that is under way."""

    def __init__(self, api: Api, socket: web.WebSocketResponse) -> None:
        self._api, self._socket = api, socket
        self._id = f"ws-{uuid.uuid4()}"
        self._validated = False
        self._audio: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._transcription: asyncio.Task[None] | None = None
        self._handlers: dict[str, Callable[[dict[str, Any]], Awaitable[None]]] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
        }

    async def run(self) -> None:
        """From the greeting to the client's leaving."""
        await self._say({"type": "session.created", "id": f"sess-{uuid.uuid4().hex[:16]}", "created": now()})
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.TEXT:
                    break  # vLLM's handler falls over a binary message, and the connection is gone
                await self._heard(message.data)
        finally:
            if self._transcription is not None:
                self._transcription.cancel()
                await asyncio.gather(self._transcription, return_exceptions=True)

    async def _heard(self, text: str) -> None:
        try:
            try:
                event = json.loads(text)
            except ValueError:
                raise EventError("invalid_json", "Invalid JSON") from None
            if not isinstance(event, dict):
                raise EventError("processing_error", f"'{type(event).__name__}' object has no attribute 'get'")
            kind = event.get("type")
            handler = self._handlers.get(kind) if isinstance(kind, str) else None
            if handler is None:
                raise EventError("unknown_event", f"Unknown event type: {kind}")
            await handler(event)
        except EventError as error:
            await self._say({"type": "error", "error": str(error), "code": error.code})

    async def _update(self, event: dict[str, Any]) -> None:
        model = event.get("model")
        if model is None:
            raise EventError("invalid_event", "Missing required field: model")
        if model not in self._api.options.served_names:
            raise EventError("model_not_found", f"The model `{model}` does not exist.")
        self._validated = True

    async def _append(self, event: dict[str, Any]) -> None:
        if "audio" not in event:
            raise EventError(
                "processing_error", "1 validation error for InputAudioBufferAppend\naudio\n  Field required"
            )
        try:
            audio = base64.b64decode(event["audio"])
        except (binascii.Error, TypeError, ValueError):
            audio = b""
        if not audio or len(audio) % 2:
            raise EventError("invalid_audio", "Invalid audio data")
        self._audio.put_nowait(audio)

    async def _commit(self, event: dict[str, Any]) -> None:
        if not self._validated:
            raise EventError(
                "model_not_validated",
                "Model not validated. Make sure to validate the model by sending a session.update event.",
            )
        if event.get("final"):
            self._audio.put_nowait(None)
        elif self._transcription is None or self._transcription.done():
            self._transcription = asyncio.get_running_loop().create_task(self._transcribe())

    async def _transcribe(self) -> None:
        """Text for every piece of audio, until the one that is the last."""
        heard = hashlib.sha256()
        text, prompt_tokens, tokens = "", 0, 0
        try:
            while (audio := await self._audio.get()) is not None:
                heard.update(audio)
                prompt = f"realtime:{heard.hexdigest()}".encode()
                prompt = prompt.ljust(4 * max(1, len(audio) // BYTES_PER_AUDIO_TOKEN), b".")
                length = max(1, len(audio) // BYTES_PER_TEXT_TOKEN)
                work = Work(prompt, length, f"{len(audio)} bytes of audio", ignore_eos=True)
                async with self._api.generating(f"rt-{self._id}-{uuid.uuid4()}", work) as generation:
                    async for output in generation:
                        text += output.text
                        await self._say({"type": "transcription.delta", "delta": output.text})
                    prompt_tokens = prompt_tokens or generation.seq.prompt_tokens
                    tokens += generation.seq.produced
        except (ApiError, EngineDead) as error:
            await self._say({"type": "error", "error": str(error), "code": "processing_error"})
            return
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}
        await self._say({"type": "transcription.done", "text": text, "usage": usage})

    async def _say(self, event: dict[str, Any]) -> None:
        if not self._socket.closed:
            await self._socket.send_str(json.dumps(event, separators=(",", ":")))
