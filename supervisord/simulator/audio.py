"""/v1/audio/transcriptions and /v1/audio/translations: multipart forms."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from aiohttp import BodyPartReader, web

from supervisord.simulator.api import Api, ApiError, Body
from supervisord.simulator.generation import Output, Work
from supervisord.simulator.openai_frames import ChatFrames

#: Encoder tokens per byte of audio: Whisper's 1500 for 30 s of 16 kHz, 16 bit sound.
BYTES_PER_AUDIO_TOKEN = 640


def routes(api: Api) -> list[web.RouteDef]:
    handlers = Audio(api)
    return [
        web.post("/v1/audio/transcriptions", handlers.transcribe),
        web.post("/v1/audio/translations", handlers.translate),
    ]


class Audio:
    """Speech to text, as far as a hash can hear."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def transcribe(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "transcription", "trsc")

    async def translate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "translation", "trsl")

    async def _answer(self, request: web.Request, task: str, prefix: str) -> web.StreamResponse:
        fields, audio = await self._form(request)
        await self._api.arrived(request, audio)
        model = self._api.model_of(fields)
        digest = hashlib.sha256(audio).hexdigest()
        prompt = f"{task}:{digest}:{fields.get('prompt', '')}".encode()
        # The encoder's share of the work is the audio's, so its tokens count; its text is only the hash.
        prompt = prompt.ljust(4 * max(1, len(audio) // BYTES_PER_AUDIO_TOKEN), b".")
        work = Work(prompt=prompt, limit=self._api.limit(prompt, None), last_text=f"{len(audio)} bytes of audio")
        async with self._api.generating(self._api.request_id(request, prefix), work) as generation:
            if str(fields.get("stream", "")).lower() in ("true", "1"):
                options = {"include_usage": str(fields.get("stream_include_usage", "")).lower() in ("true", "1")}
                frames = AudioFrames(self._api, {"stream_options": options}, generation, model)
                frames.object = f"{task}.chunk"
                return await self._api.stream(request, generation, frames)
            await self._api.collect(generation)
            if fields.get("response_format") == "text":
                return web.Response(text=generation.text)
            return web.json_response({"text": generation.text, "usage": {"type": "duration", "seconds": 1}})

    async def _form(self, request: web.Request) -> tuple[Body, bytes]:
        """The form's fields, and the file; nothing is written to disk."""
        if request.content_type != "multipart/form-data":
            raise ApiError(400, "Bad Request", "Field required: file", "file", in_validation=True)
        fields: Body = {}
        audio: bytes | None = None
        try:
            async for part in await request.multipart():
                if isinstance(part, BodyPartReader):
                    if part.name == "file":
                        audio = bytes(await part.read())
                    else:
                        fields[part.name or ""] = await part.text()
        except ValueError as error:
            raise ApiError(400, "Bad Request", f"cannot parse the form: {error}", in_validation=True) from None
        if audio is None:
            raise ApiError(400, "Bad Request", "Field required: file", "file", in_validation=True)
        return fields, audio


class AudioFrames(ChatFrames):
    """Transcription chunks: chat chunks without a role."""

    def open(self) -> Iterable[str]:
        return ()

    def piece(self, output: Output) -> Iterable[str]:
        yield self.chunk({"delta": {"content": output.text}, "finish_reason": output.finish, "stop_reason": None})
