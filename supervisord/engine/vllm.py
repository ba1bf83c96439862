"""vLLM's control face over HTTP: one look at an engine, and the calls that a sleep and a wake consist of.

The behaviour relied on is vLLM's with VLLM_SERVER_DEV_MODE=1 (tests/engine holds this file against the real one):

    GET  /health              200, also while asleep and while the engine core hangs; 5xx when it is dead
    GET  /v1/models           the served names and the context length
    GET  /is_sleeping         asks the engine core, so it hangs with it: the deep probe. 404 without dev mode
    POST /sleep               ?level=N&mode=wait: query parameters (a body is ignored); mode's default aborts requests
    POST /wake_up             [?tags=weights&tags=kv_cache]
    POST /collective_rpc      {"method": "reload_weights"}
    POST /reset_prefix_cache
    GET  /metrics             answered by the API server while the engine core hangs: whether it still got anywhere;
                              and, once per run, how many tokens the KV cache holds

Every request has a connection of its own. vLLM closes a kept one after 5 seconds, and a POST that meets the close fails
without having been seen, which would look like a failed wake; a probe also learns more from a fresh connection: whether
the engine still accepts one, and who answers there now.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

import aiohttp

from supervisord.core.canary import Fingerprint
from supervisord.core.readings import EngineState, Probe
from supervisord.engine import fingerprint, kvcache
from supervisord.ports import EngineError

log = logging.getLogger(__name__)

#: The most that is read of an answer; a list of a thousand adapters is a tenth of it.
_ANSWER_LIMIT = 2 * 1024 * 1024
#: How much of an engine's answer an error text quotes, characters.
_QUOTE = 300
#: How long an engine's API server may take to tell its metrics, seconds. Measured on a busy one: milliseconds.
_METRICS_TIMEOUT = 1.0
#: A Unix socket with a full accept queue answers connect with EAGAIN, which asyncio takes for progress until it writes.
_QUEUE_FULL = frozenset({errno.EAGAIN, errno.ENOTCONN})


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> object:
        """The body as JSON, or None."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def quote(self) -> str:
        """Status and body as one short line: the error's own message where it is vLLM's JSON."""
        text = self.body.decode("utf-8", "replace")
        value = self.json()
        if isinstance(value, dict):
            error = value.get("error", value.get("detail", value))
            message = error.get("message") if isinstance(error, dict) else error
            text = str(message or error)
        text = " ".join(text.split())
        return f"{self.status}: {text if len(text) <= _QUOTE else text[:_QUOTE] + '...'}".rstrip(": ")


@dataclass(slots=True)
class _Look:
    """How far one probe has come, so that one cut short still tells what it saw."""

    asking: str = "/health"
    names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_model_len: int | None = None
    simulated: bool = False

    def found(self, state: EngineState, detail: str = "") -> Probe:
        text = f"GET {self.asking}: {detail}" if detail else ""
        return Probe(state, text, self.names, self.max_model_len, simulated=self.simulated, adapters=self.adapters)


class _NoAnswer(Exception):
    """A request got no HTTP answer; ``state`` is what a probe makes of it."""

    def __init__(self, state: EngineState, reason: str) -> None:
        super().__init__(reason)
        self.state = state


class VllmEngine:
    """One vLLM (or its simulator) at ``http://host:port`` or ``unix:/path``; implements ``ports.Engine``.

    ``expected_names``: the engine is the right one when it serves at least one of these; empty: whatever it serves.
    ``api_key``: what the engine was given as ``--api-key``; without it such an engine cannot say which model it serves.
    Must be closed. Calls may overlap.
    """

    def __init__(self, endpoint: str, expected_names: Sequence[str] = (), api_key: str | None = None) -> None:
        self.endpoint = endpoint
        self._expected = frozenset(expected_names)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._path = endpoint.removeprefix("unix:") if endpoint.startswith("unix:") else None
        self._base = "http://engine" if self._path is not None else endpoint.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        #: The first name that it was last seen to serve.
        self._model: str | None = None
        #: What its KV cache holds, tokens (0: not told); None until it was asked since it was last seen not awake.
        self._kv_tokens: int | None = None

    async def probe(self, timeout: float) -> Probe:
        """Look once, within ``timeout`` seconds. Never raises for what the engine does, and never wakes it.

        Its metrics are read too where only the engine core is silent, and once when it is awake: at most one second
        more.
        """
        look = _Look()
        try:
            async with asyncio.timeout(timeout):
                found = await self._look(look)
        except TimeoutError:
            found = look.found(EngineState.HUNG, f"no answer in {timeout:g} s")
        except _NoAnswer as error:
            found = look.found(error.state, str(error))
        if found.state is EngineState.AWAKE:
            return replace(found, kv_tokens=await self._kv_cache(found.max_model_len))
        self._kv_tokens = None  # it may be another one when it is back
        if found.state is EngineState.HUNG and look.asking == "/is_sleeping":
            metrics = await self._metrics()
            return replace(found, progress=fingerprint.progress_of(metrics) if metrics is not None else None)
        return found

    async def verify(self, timeout: float) -> Probe:
        """``/is_sleeping`` alone: who answers and what it serves was seen before. Never raises."""
        look = _Look(asking="/is_sleeping")
        try:
            async with asyncio.timeout(timeout):
                return await self._ask_core(look)
        except TimeoutError:
            return look.found(EngineState.HUNG, f"no answer in {timeout:g} s")
        except _NoAnswer as error:
            return look.found(error.state, str(error))

    async def sleep(self, level: int, timeout: float) -> None:
        """Ask for a sleep; the caller has drained the engine before and verifies after.

        Asking a level-1 sleeper for level 2 is answered as if it were done, and is not: wake it first.
        """
        await self._command("sleep", "/sleep", timeout, query=[("level", str(level)), ("mode", "wait")])

    async def wake_up(self, tags: Sequence[str], timeout: float) -> None:
        """Wake the parts named by ``tags`` (weights, kv_cache, scheduling); none named: everything."""
        await self._command("wake up", "/wake_up", timeout, query=[("tags", tag) for tag in tags])

    async def reload_weights(self, timeout: float) -> None:
        """Load the weights again where a level-2 sleep dropped them; after ``wake_up`` of ``weights``."""
        await self._command("reload the weights", "/collective_rpc", timeout, body={"method": "reload_weights"})

    async def reset_prefix_cache(self, timeout: float) -> None:
        """Forget every cached prefix: after a level-2 wake the blocks hold nothing that belongs to them."""
        await self._command("reset the prefix cache", "/reset_prefix_cache", timeout)

    async def fingerprint(self, timeout: float) -> Fingerprint | None:
        """What it answers to a fixed prompt at temperature 0; None when it refuses every way of asking known here.

        Raises ``EngineError`` when it fails, or does not answer in ``timeout`` seconds.
        """
        route, missing = "", set()
        try:
            async with asyncio.timeout(timeout):
                for route, echo in fingerprint.ATTEMPTS:
                    if route in missing:
                        continue
                    body = fingerprint.request(route, self._model, echo=echo)
                    answer = await self._request("POST", route, body=body)
                    if answer.status == 200:
                        return fingerprint.read(route, answer.json())
                    if answer.status >= 500 and answer.status != 501:
                        raise EngineError(f"cannot take a fingerprint: POST {route}: {answer.quote()}")
                    log.debug("%s gives no fingerprint: POST %s: %s", self.endpoint, route, answer.quote())
                    if answer.status == 404:
                        missing.add(route)
        except TimeoutError:
            raise EngineError(f"cannot take a fingerprint: POST {route}: no answer in {timeout:g} s") from None
        except (_NoAnswer, fingerprint.Unanswered) as error:
            raise EngineError(f"cannot take a fingerprint: POST {route}: {error}") from error
        return None

    async def read_json(self, path: str, timeout: float) -> object:
        """The JSON value at another of the engine's GET routes; None when there is none in ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                answer = await self._request("GET", path)
        except (TimeoutError, _NoAnswer):
            return None
        return answer.json() if answer.status == 200 else None

    async def _kv_cache(self, max_model_len: int | None) -> int | None:
        if self._kv_tokens is None:
            metrics = await self._metrics()
            if metrics is not None:
                self._kv_tokens = kvcache.tokens_of(metrics, max_model_len)
        return self._kv_tokens

    async def _metrics(self) -> str | None:
        try:
            async with asyncio.timeout(_METRICS_TIMEOUT):
                answer = await self._request("GET", "/metrics")
        except (TimeoutError, _NoAnswer):
            return None
        return answer.body.decode("utf-8", "replace") if answer.status == 200 else ""

    async def close(self) -> None:
        """Close the connections; the engine may be used again afterwards."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _look(self, look: _Look) -> Probe:
        health = await self._request("GET", "/health")
        if health.status >= 500:
            return look.found(EngineState.BROKEN, health.quote())
        if health.status != 200:
            return look.found(EngineState.WRONG_MODEL, f"{health.status}, which is no answer of vLLM's")

        # Who it is comes before how it is: another program's idea of being asleep is of no interest.
        look.asking = "/v1/models"
        models = await self._request("GET", "/v1/models")
        look.names, look.adapters, look.max_model_len = _served(models)
        self._model = look.names[0] if look.names else None
        look.simulated = "x-simulated" in models.headers
        keyless = models.status in (401, 403)  # it wants its --api-key, so who it is cannot be asked
        if models.status >= 500:
            return look.found(EngineState.BROKEN, models.quote())
        if not look.names and not keyless:
            return look.found(EngineState.WRONG_MODEL, f"no list of models: {models.quote()}")
        if self._expected and look.names and self._expected.isdisjoint(look.names):
            wanted = " or ".join(sorted(self._expected))
            return look.found(EngineState.WRONG_MODEL, f"it serves {', '.join(look.names)}, not {wanted}")

        look.asking = "/is_sleeping"
        detail = f"its names are not known, for it wants an API key ({models.status})" if keyless else ""
        return await self._ask_core(look, detail)

    async def _ask_core(self, look: _Look, detail: str = "") -> Probe:
        sleeping = await self._request("GET", "/is_sleeping")
        if sleeping.status == 404:
            return replace(look.found(EngineState.AWAKE, detail), can_sleep=False)
        value = sleeping.json()
        answer = value.get("is_sleeping") if sleeping.status == 200 and isinstance(value, dict) else None
        if not isinstance(answer, bool):
            return look.found(EngineState.BROKEN, sleeping.quote())
        return look.found(EngineState.ASLEEP if answer else EngineState.AWAKE, detail)

    async def _command(
        self,
        what: str,
        path: str,
        timeout: float,
        query: Sequence[tuple[str, str]] = (),
        body: Mapping[str, object] | None = None,
    ) -> None:
        call = f"POST {path}{_query(query)}"
        try:
            async with asyncio.timeout(timeout):
                answer = await self._request("POST", path, query, body)
        except TimeoutError:
            raise EngineError(f"cannot {what}: {call}: no answer in {timeout:g} s") from None
        except _NoAnswer as error:
            raise EngineError(f"cannot {what}: {call}: {error}") from error
        if answer.status != 200:
            hint = " (an engine sleeps only with VLLM_SERVER_DEV_MODE=1)" if answer.status == 404 else ""
            raise EngineError(f"cannot {what}: {call}: {answer.quote()}{hint}")

    async def _request(
        self, method: str, path: str, query: Sequence[tuple[str, str]] = (), body: Mapping[str, object] | None = None
    ) -> _Answer:
        if self._session is None:
            self._session = self._open()
        url = f"{self._base}{path}{_query(query)}"
        try:
            async with self._session.request(method, url, json=body, allow_redirects=False) as response:
                return _Answer(response.status, response.headers, await _read(response.content))
        except aiohttp.ClientConnectorError as error:
            if error.errno in _QUEUE_FULL:
                raise _NoAnswer(EngineState.HUNG, "it accepts no more connections") from error
            # Refused, no such socket file; or a mistake of ours (no such host, no permission), which the text tells.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.os_error)
            raise _NoAnswer(EngineState.UNREACHABLE, f"cannot connect to {self.endpoint}: {reason}") from error
        except aiohttp.ClientResponseError as error:
            raise _NoAnswer(EngineState.WRONG_MODEL, f"the answer is not HTTP: {error.message}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _QUEUE_FULL:
                raise _NoAnswer(EngineState.HUNG, "it accepts no more connections") from error
            # It listens, took the request, and closed: a process on its way out, or one that crashes on it.
            raise _NoAnswer(EngineState.BROKEN, "the connection was closed without an answer") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._path is not None:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(self._path, force_close=True, limit=0)
        else:
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # each call brings its own
        )


def _query(parameters: Sequence[tuple[str, str]]) -> str:
    return f"?{urlencode(parameters)}" if parameters else ""


async def _read(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    while chunk := await content.read(64 * 1024):
        body += chunk
        if len(body) > _ANSWER_LIMIT:
            raise _NoAnswer(EngineState.WRONG_MODEL, f"the answer is longer than {_ANSWER_LIMIT} bytes")
    return bytes(body)


def _served(models: _Answer) -> tuple[tuple[str, ...], tuple[str, ...], int | None]:
    """The served names in the engine's order, the adapters (which have a parent), and the context length."""
    value = models.json()
    rows = value.get("data") if models.status == 200 and isinstance(value, dict) else None
    if not isinstance(rows, list):
        return (), (), None
    named = [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
    own = [row for row in named if not row.get("parent")]
    adapters = tuple(row["id"] for row in named if row.get("parent"))
    lengths = [row["max_model_len"] for row in own if type(row.get("max_model_len")) is int]
    return tuple(row["id"] for row in own), adapters, lengths[0] if lengths else None
