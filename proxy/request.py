"""Reading a request's body without rewriting it: the model, the facts for routing, and where the model's name stands.

The top level of a JSON body is walked member by member with the standard library's own scanner, so what is accepted and
what it means is exactly ``json.loads``; every member's place in the text comes for free. Nothing is ever re-serialised:
where a replica serves the model under another name, the bytes of that one string are replaced.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from proxy.body import Body, Splice
from proxy.errors import bad_request
from proxy.facts import Facts, Value, facts_of
from proxy.multipart import read_form
from proxy.routes import Handler, Prompt, Route

_DECODER = json.JSONDecoder()
_SPACES = frozenset(" \t\n\r")
_SPACE = re.compile(r"[ \t\n\r]*")
#: Members whose elements are wanted one by one.
_ARRAYS = frozenset({"messages", "input"})


@dataclass(frozen=True, slots=True)
class ModelName:
    """Where the body has the model's name: bytes ``start`` to ``end``, in JSON (quotes included) or plain."""

    start: int
    end: int
    encoding: str = "utf-8"
    json: bool = True

    def replaced_by(self, name: str) -> Splice:
        """The change that gives the body another model name."""
        text = json.dumps(name) if self.json else name
        return Splice(self.start, self.end, text.encode(self.encoding))


@dataclass(frozen=True, slots=True)
class Read:
    """What reading a body found. ``model_name`` is None where the body names no model."""

    facts: Facts
    model_name: ModelName | None


def read_body(route: Route, content_type: str, body: Body) -> Read:
    """Read a complete body (a spooled one from its file); raises ``ProxyError`` 400 if it is not what a route takes."""
    if route.handler is Handler.ENGINE_FORM:
        form = read_form(content_type, body)
        place = None if form.model is None else ModelName(form.start, form.end, json=False)
        return Read(Facts(form.model or None, form.stream), place)
    return read_json(body.text_bytes(), route.prompt)


def read_json(data: bytes | bytearray, prompt: Prompt) -> Read:
    """Read a JSON object; raises ``ProxyError`` 400 for anything else."""
    try:
        encoding, mark = _encoding(data)
        text = (data[mark:] if mark else data).decode(encoding, "surrogatepass")
        members = _object(text)
        facts = facts_of(members, prompt)
    except _NotAnObject:
        raise bad_request("the request body must be a JSON object") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"cannot parse the request body as JSON: {error}") from None
    except RecursionError:
        raise bad_request("cannot parse the request body as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise bad_request(str(error)) from None
    if "model" not in members:
        return Read(facts, None)
    value = members["model"]
    start = mark + len(text[: value.start].encode(encoding, "surrogatepass"))
    return Read(facts, ModelName(start, start + len(value.raw.encode(encoding, "surrogatepass")), encoding))


def _encoding(data: bytes | bytearray) -> tuple[str, int]:
    """The body's encoding as ``json.loads`` finds it, and the length of its byte order mark."""
    match json.detect_encoding(data):
        case "utf-8-sig":
            return "utf-8", 3
        case "utf-16":
            return ("utf-16-be" if data.startswith(codecs.BOM_UTF16_BE) else "utf-16-le"), 2
        case "utf-32":
            return ("utf-32-be" if data.startswith(codecs.BOM_UTF32_BE) else "utf-32-le"), 4
        case plain:
            return plain, 0


class _NotAnObject(Exception):
    pass


def _object(text: str) -> dict[str, Value]:
    """The top-level members; of equal names the last, as ``json.loads``."""
    return dict(_members(text))


def _members(text: str) -> Iterator[tuple[str, Value]]:
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        _, at = _scan(text, at)
        _expect_end(text, at)
        raise _NotAnObject
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        _expect_end(text, at + 1)
        return
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        name, at = _scan(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        start = _skip(text, at + 1)
        assert isinstance(name, str)
        value = _array(text, start) if name in _ARRAYS and text[start : start + 1] == "[" else _value(text, start)
        yield name, value
        at = _skip(text, value.end)
        following = text[at : at + 1]
        if following == "}":
            _expect_end(text, at + 1)
            return
        if following != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _skip(text, at + 1)


def _array(text: str, start: int) -> Value:
    elements: list[Value] = []
    at = _skip(text, start + 1)
    if text[at : at + 1] != "]":
        while True:
            elements.append(_value(text, at))
            at = _skip(text, elements[-1].end)
            following = text[at : at + 1]
            if following == "]":
                break
            if following != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = _skip(text, at + 1)
    return Value(text, start, at + 1, [element.value for element in elements], tuple(elements))


def _value(text: str, at: int) -> Value:
    value, end = _scan(text, at)
    return Value(text, at, end, value)


def _scan(text: str, at: int) -> tuple[object, int]:
    return _DECODER.raw_decode(text, at)


def _skip(text: str, at: int) -> int:
    if text[at : at + 1] not in _SPACES:  # most often there is no space, or one
        return at
    at += 1
    if text[at : at + 1] not in _SPACES:
        return at
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _expect_end(text: str, at: int) -> None:
    at = _skip(text, at)
    if at != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
