"""Finding the ``model`` field of a multipart form (RFC 7578), wherever it stands, without parsing the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.body import Body
from proxy.errors import bad_request

_BOUNDARY = re.compile(r'(?i);\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
_FIELD_NAME = re.compile(rb'(?i)^content-disposition:[^\r\n]*?;\s*name=(?:"([^"]*)"|([^\s;"]+))', re.MULTILINE)
_FILE_NAME = re.compile(rb"(?i)^content-disposition:[^\r\n]*?;\s*filename\*?=", re.MULTILINE)

#: More part headers than a form needs, and longer values than a model's name has.
_MAX_PART_HEAD = 16 * 1024
_MAX_VALUE = 4 * 1024
_MAX_PARTS = 1000


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
    # The first delimiter opens the body (a preamble may stand before it), every other one follows a line break.
    at = 0 if body.read(0, len(delimiter)) == delimiter else _after_break(body, delimiter, 0)
    for _ in range(_MAX_PARTS):
        head_start = at + len(delimiter)
        if body.read(head_start, head_start + 2) == b"--":
            return Form(model, start, end, stream)
        head_end = body.find(b"\r\n\r\n", head_start)
        if head_end < 0 or head_end - head_start > _MAX_PART_HEAD:
            raise bad_request("cannot parse the multipart form: a part has no headers")
        head = body.read(head_start, head_end)
        at = _after_break(body, delimiter, head_end + 2)  # an empty part may share its line break with the headers' end
        value_start = head_end + 4
        value_end = max(value_start, at - 2)
        name = _FIELD_NAME.search(head)
        if name is None or _FILE_NAME.search(head) or value_end - value_start > _MAX_VALUE:
            continue
        value = body.read(value_start, value_end).decode("utf-8", "replace")
        match name[1] or name[2]:
            case b"model":
                model, start, end = value, value_start, value_end
            case b"stream":
                stream = value.strip().lower() in ("true", "1")
            case _:
                pass
    raise bad_request(f"cannot parse the multipart form: more than {_MAX_PARTS} parts")


def _after_break(body: Body, delimiter: bytes, start: int) -> int:
    at = body.find(b"\r\n" + delimiter, start)
    if at < 0:
        raise bad_request("cannot parse the multipart form: it has no closing boundary")
    return at + 2
