"""Finding the ``model`` field of a multipart form (RFC 7578), wherever it stands, without parsing the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.errors import bad_request
from proxy.http.body import Body

_BOUNDARY = re.compile(r'(?i);\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
#: RFC 7578 4.2: what a part is. A line that could be read in two ways is no such line.
_DISPOSITION = re.compile(rb"(?i)content-disposition:[ \t]*form-data[ \t]*")
_PARAMETER = re.compile(rb';[ \t]*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\\r\n]|\\.)*)"|([^\s;"\\]+))[ \t]*')

#: The fields that are read.
_WANTED = (b"model", b"stream")

#: More part headers than a form needs, and longer values than a model's name has.
_MAX_PART_HEAD = 16 * 1024
_MAX_VALUE = 4 * 1024
_MAX_PARTS = 1000
#: Bytes of empty lines before the first part.
_MOST_EMPTY = 64


@dataclass(frozen=True, slots=True)
class Form:
    """What the proxy needs of a form: the model's name and where its bytes stand; of equal fields the last counts."""

    model: str | None = None
    start: int = 0
    end: int = 0
    stream: bool = False


def read_form(content_type: str, body: Body) -> Form:
    """Look through a complete form; raises ``ProxyError`` 400 where it is none."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None or not content_type.lower().lstrip().startswith("multipart/form-data"):
        raise bad_request("the request body must be multipart/form-data with a boundary")
    delimiter = b"--" + (boundary[1] or boundary[2]).encode("latin-1", "replace")
    model, start, end, stream = None, 0, 0, False
    # The first delimiter opens the body, after empty lines at most: what engines read forms with takes no preamble.
    opening = body.read(0, _MOST_EMPTY)
    at = len(opening) - len(opening.lstrip(b"\r\n"))
    if body.read(at, at + len(delimiter)) != delimiter:
        raise bad_request("cannot parse the multipart form: it does not begin with its boundary")
    for _ in range(_MAX_PARTS):
        head_start = at + len(delimiter)
        if body.read(head_start, head_start + 2) == b"--":
            return Form(model, start, end, stream)
        if body.read(head_start, head_start + 2) != b"\r\n":
            # Also where the boundary is the beginning of a line of a part: it must not be (RFC 2046 5.1.1).
            raise bad_request("cannot parse the multipart form: a boundary is not on a line of its own")
        head_end = body.find(b"\r\n\r\n", head_start)
        if head_end < 0 or head_end - head_start > _MAX_PART_HEAD:
            raise bad_request("cannot parse the multipart form: a part has no headers")
        head = body.read(head_start, head_end)
        value_start = head_end + 4
        at = _after_break(body, delimiter, value_start)
        value_end = at - 2
        parameters = _parameters(head)
        name = parameters.get(b"name")
        if name not in _WANTED or b"filename" in parameters or b"filename*" in parameters:
            continue
        if value_end - value_start > _MAX_VALUE:
            raise bad_request(f"cannot parse the multipart form: {name.decode()} is longer than {_MAX_VALUE} bytes")
        value = body.read(value_start, value_end).decode("utf-8", "replace")
        if name == b"model":
            model, start, end = value, value_start, value_end
        else:
            stream = value.strip().lower() in ("true", "1")
    raise bad_request(f"cannot parse the multipart form: more than {_MAX_PARTS} parts")


def _parameters(head: bytes) -> dict[bytes, bytes]:
    """The parameters of a part's Content-Disposition; raises ``ProxyError`` 400 where they are not plain."""
    found: dict[bytes, bytes] = {}
    lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition")]
    opening = _DISPOSITION.match(lines[0]) if len(lines) == 1 else None
    at = opening.end() if opening is not None else -1
    while opening is not None and at < len(lines[0]):
        parameter = _PARAMETER.match(lines[0], at)
        if parameter is None or parameter[1].lower() in found:
            opening = None
            break
        found[parameter[1].lower()] = parameter[3] if parameter[2] is None else parameter[2]
        at = parameter.end()
    if opening is None:
        raise bad_request("cannot parse the multipart form: a part's Content-Disposition is not one plain line")
    return found


def _after_break(body: Body, delimiter: bytes, start: int) -> int:
    at = body.find(b"\r\n" + delimiter, start)
    if at < 0:
        raise bad_request("cannot parse the multipart form: it has no closing boundary")
    return at + 2
