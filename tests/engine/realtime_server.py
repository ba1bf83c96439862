"""vLLM's own handler of /v1/realtime under its own server, with a stand-in for the model. Runs in the engine's Python.

There is no model with realtime transcription small enough for a test; what is not vLLM's here is what would be its
scheduler: every piece of audio becomes one word.
"""

import sys
from types import SimpleNamespace

import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.speech_to_text.realtime.api_router import router


class Engine:
    """As much of an engine client as the handler uses."""

    async def generate(self, prompt, sampling_params, request_id):
        async for _ in prompt:
            output = SimpleNamespace(text="word ", token_ids=[1])
            yield SimpleNamespace(outputs=[output], prompt_token_ids=[1, 2, 3])

    async def abort(self, request_id):
        pass


class Serving:
    """As much of ``OpenAIServingRealtime`` as the handler uses."""

    model_cls = SimpleNamespace(realtime_max_tokens=1)
    engine_client = Engine()

    def _is_model_supported(self, model):
        return model in (None, "m")

    def create_error_response(self, message, **_more):
        return SimpleNamespace(error=SimpleNamespace(message=message))

    async def transcribe_realtime(self, audio_stream, input_stream):
        async for piece in audio_stream:
            yield piece


app = FastAPI()
app.include_router(router)
app.state.openai_serving_realtime = Serving()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
