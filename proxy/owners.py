"""Which replica made a response, by the response's id. Pure.

An engine keeps responses in its process's memory: they outlive its sleep, and no restart.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable

from supervisord.core.admission import Running

#: Responses whose replica is remembered; about a fifth of a kilobyte each. The others are found by asking.
MOST = 16384

#: Bytes in which an answer tells the id, the first of them where it has no framing.
_HEAD = 2048
#: What an id looks like. Nothing else is asked of an engine: an id becomes part of a request's target.
ID = "[A-Za-z0-9_-]{1,256}"
_ID = re.compile(ID)
#: Of a whole response its first member; of a stream that of the response in its first event.
_WHOLE = re.compile(rb'\s*\{\s*"id"\s*:\s*"(%b)"' % ID.encode())
_EVENT = re.compile(rb'"response"\s*:\s*\{\s*"id"\s*:\s*"(%b)"' % ID.encode())


def is_response_id(text: str) -> bool:
    """Whether it could be the id of a response; what a client wrote into a body may be anything."""
    return _ID.fullmatch(text) is not None


def response_id(beginning: bytes) -> str:
    """The id that an answer to POST /v1/responses begins with; empty where it does not say."""
    head = beginning[:_HEAD]
    found = _WHOLE.match(head) or _EVENT.search(head)
    return found[1].decode() if found else ""


class Owners:
    """The newest responses and where they are."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._places: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def learn(self, response: str, place: Running) -> None:
        """That replica has it."""
        self._places[response] = (place.replica, place.run)
        self._places.move_to_end(response)
        if len(self._places) > self._most:
            self._places.popitem(last=False)

    def find(self, response: str, running: Iterable[Running]) -> Running | None:
        """The replica that made it, if it is known and still the same process."""
        known = self._places.get(response)
        if known is None:
            return None
        for place in running:
            if (place.replica, place.run) == known:
                self._places.move_to_end(response)
                return place
        self.forget(response)
        return None

    def forget(self, response: str) -> None:
        """It is not there any more."""
        self._places.pop(response, None)
