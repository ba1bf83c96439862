"""What the end of an answer tells of its tokens, in any dialect, without parsing the answer."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Bytes at the end of an answer in which its usage stands.
TAIL = 2048

_PROMPT = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})')
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d{1,9})')


class Usage(NamedTuple):
    """Tokens as the engine counted them; None where it did not tell."""

    prompt: int
    completion: int | None
    #: Of the prompt's, those that were in the prefix cache.
    cached: int | None

    @property
    def cached_share(self) -> float | None:
        """The share of the prompt that was found in the cache, 0 to 1."""
        if self.cached is None or not self.prompt:
            return None
        return min(1.0, self.cached / self.prompt)


def usage_of(answer: bytes) -> Usage | None:
    """The usage in an answer; None where it does not tell.

    An engine tells of cached tokens with ``--enable-prompt-tokens-details``; in a stream, of any only to a client that
    asked for its usage.
    """
    tail = answer[-TAIL:]
    if b'_tokens":' not in tail:
        return None
    prompt = _last(_PROMPT, tail)
    return None if prompt is None else Usage(prompt, _last(_COMPLETION, tail), _last(_CACHED, tail))


def _last(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    found = pattern.findall(data)
    return int(found[-1]) if found else None
