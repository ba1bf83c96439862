"""What the end of an answer tells of the prefix cache, in any dialect, without parsing the answer."""

from __future__ import annotations

import re

#: Bytes at the end of an answer in which its usage stands.
TAIL = 2048

_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d{1,9})')


def cached_share(answer: bytes) -> float | None:
    """The share of the prompt that was found in the cache, 0 to 1; None where the answer does not tell.

    An engine tells with ``--enable-prompt-tokens-details``; in a stream only to a client that asked for its usage.
    """
    tail = answer[-TAIL:]
    cached = _last(_CACHED, tail)
    prompt = _last(_PROMPT, tail)
    if cached is None or not prompt:
        return None
    return min(1.0, cached / prompt)


def _last(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    found = pattern.findall(data)
    return int(found[-1]) if found else None
