"""Reading a request's body without rewriting it: the model, the facts for routing, and where the model's name stands.

What is accepted, and what it means, is exactly ``json.loads``. Nearly every body is read the quick way (see
``proxy.reading.members``). For the others the top level is walked member by member with the standard library's own
scanner, and every member's place in the text comes for free. Nothing is ever re-serialised: where a replica serves the
model under another name, the bytes of that one string are replaced.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]

from proxy.errors import bad_request
from proxy.http.body import Body, Splice
from proxy.reading.facts import Facts, Value, facts_of
from proxy.reading.members import read_members
from proxy.reading.multipart import read_form
from proxy.routes import Handler, Prompt, Route

#: The standard library's own scanner: the value at a place of a text, and where it ends.
_SCAN_ONCE: Callable[[str, int], tuple[object, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_SPACES = frozenset(" \t\n\r")
_SPACE = re.compile(r"[ \t\n\r]*")
#: Members whose elements are wanted one by one.
_ARRAYS = frozenset({"messages", "input"})
#: Characters of a model's name, as in forms: whoever is refused is told the name, and so is the log.
MOST_NAME = 4096


@dataclass(slots=True)
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


class UnplacedName:
    """A model's name that is in a JSON body as ``written``; where, is looked for when somebody wants it replaced."""

    def __init__(self, written: bytes, body: Callable[[], bytes | bytearray]) -> None:
        self._written, self._body = written, body

    def replaced_by(self, name: str) -> Splice:
        """See ``ModelName``."""
        data = self._body()
        start = data.find(self._written)
        if data.find(self._written, start + 1) < 0:  # there is no other text that it could be
            return ModelName(start, start + len(self._written)).replaced_by(name)
        exact = _read_exactly(data, Prompt.NONE).model_name
        assert exact is not None
        return exact.replaced_by(name)


@dataclass(slots=True)
class Read:
    """What reading a body found. ``model_name`` is None where the body names no model."""

    facts: Facts
    model_name: ModelName | UnplacedName | None


def read_body(route: Route, content_type: str, body: Body) -> Read:
    """Read a complete body (a spooled one from its file); raises ``ProxyError`` 400 if it is not what a route takes."""
    if route.handler is Handler.ENGINE_FORM:
        form = read_form(content_type, body)
        place = None if form.model is None else ModelName(form.start, form.end, json=False)
        return Read(Facts(form.model or None, form.stream), place)
    return read_json(body.text_bytes(), route.prompt, body.text_bytes)


def read_json(data: bytes | bytearray, prompt: Prompt, again: Callable[[], bytes | bytearray] | None = None) -> Read:
    """Read a JSON object; raises ``ProxyError`` 400 for anything else.

    ``again`` gives ``data`` as long as it is there; without it the result keeps it.
    """
    quick = read_members(data, prompt)
    if quick is None:
        read = _read_exactly(data, prompt)
    else:
        facts, written = quick
        read = Read(facts, UnplacedName(written, again or (lambda: data)) if written else None)
    if read.facts.model is not None and len(read.facts.model) > MOST_NAME:
        raise bad_request(f"the model's name is longer than {MOST_NAME} characters", param="model")
    return read


def _read_exactly(data: bytes | bytearray, prompt: Prompt) -> Read:
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
        name, at = scanstring(text, at + 1)
        if text[at : at + 1] != ":":  # a space before it is rare
            at = _skip(text, at)
            if text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        at = _skip(text, at + 1)
        if name in _ARRAYS and text[at : at + 1] == "[":
            value = _array(text, at)
        else:
            found, end = _scan(text, at)
            value = Value(text, at, end, found)
        yield name, value
        at = value.end
        following = text[at : at + 1]
        if following in _SPACES:
            at = _skip(text, at)
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
            value, end = _scan(text, at)
            elements.append(Value(text, at, end, value))
            at = _skip(text, end)
            following = text[at : at + 1]
            if following == "]":
                break
            if following != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = _skip(text, at + 1)
    return Value(text, start, at + 1, [element.value for element in elements], tuple(elements))


def _scan(text: str, at: int) -> tuple[object, int]:
    try:
        return _SCAN_ONCE(text, at)
    except StopIteration as stop:
        raise json.JSONDecodeError("Expecting value", text, stop.value) from None


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
