"""Web pages, by the Origin that a browser names in their requests (RFC 6454, the Fetch standard). Pure.

A page may send some requests to any address that its reader's browser can reach, and the browser asks nobody first: it
only keeps the answer from the page. By then a model was woken and has computed, so the server must refuse them.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from proxy.http.headers import RequestHead

#: The types of body that need no preflight; what has none may have a body all the same.
_SIMPLE_TYPES = frozenset({"", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})
#: What a browser says of a request of the site's own page, or of nobody's (an extension's, the reader's own).
_NO_STRANGERS = (b"same-origin", b"none")


def may(origin: str, hosts: Collection[str], origins: Collection[str]) -> bool:
    """Whether the page is one of the port's own ``hosts``, or of the list ``origins``, or all may (``*``)."""
    if "*" in origins or origin.lower() in {known.lower() for known in origins}:
        return True
    try:
        page = urlsplit(origin)
    except ValueError:  # a bracket that belongs to no address
        return False
    return page.scheme in ("http", "https") and [page.netloc.lower()] == [host.lower() for host in hosts]


def goes_unasked(head: RequestHead) -> bool:
    """Whether a browser sends this POST for a page of any site, without a preflight."""
    return (
        head.content_type.partition(";")[0].strip().lower() in _SIMPLE_TYPES
        and head.field(b"origin") != b""
        and head.field(b"sec-fetch-site") not in _NO_STRANGERS
        and not _shows_a_key(head)
    )


def _shows_a_key(head: RequestHead) -> bool:
    """Whether it shows one as no page may unasked. Basic credentials, and the like, a browser adds by itself."""
    return head.field(b"x-api-key") != b"" or head.field(b"authorization")[:7].lower() == b"bearer "
