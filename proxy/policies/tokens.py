"""How many bytes of a request make a token: learned from what answers tell of their prompts."""

from __future__ import annotations

#: As usual for English and code, and how many bytes that guess weighs against what was seen.
FIRST_GUESS, GUESS_WEIGHT = 4.0, 65_536
#: Bytes after which what was seen counts half.
_MEMORY = 16 * 1024 * 1024


class TokenSize:
    """The bytes per token of one model's requests, as they are now."""

    def __init__(self) -> None:
        self._bytes, self._tokens = float(GUESS_WEIGHT), GUESS_WEIGHT / FIRST_GUESS
        self.size = FIRST_GUESS

    def add(self, size: int, tokens: int) -> None:
        """A prompt of ``size`` bytes had so many tokens."""
        self._bytes += size
        self._tokens += tokens
        if self._bytes > _MEMORY:
            self._bytes, self._tokens = self._bytes / 2, self._tokens / 2
        self.size = self._bytes / self._tokens
