"""The prefix cache: whole blocks, found by a chained hash, least recently used out first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from supervisord.simulator.tokens import BYTES_PER_TOKEN, count


@dataclass(frozen=True, slots=True)
class Hit:
    """What of a prompt was found."""

    tokens: int
    #: The blocks were computed while the weights were not whole: what builds on them is garbage too.
    tainted: bool


class PrefixCache:
    """``capacity``: blocks that fit; ``block_size``: tokens per block (vLLM's default is 16)."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._blocks: OrderedDict[int, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self, text: bytes, salt: str = "", known: Sequence[int] = ()) -> list[int]:
        """One key per full block; each covers all before it. ``salt`` (the request's cache_salt) enters the first.

        ``known``: the keys of the first blocks, where they were computed before.
        """
        size = self._block_size * BYTES_PER_TOKEN
        keys, parent = list(known), known[-1] if known else hash(salt)
        for start in range(len(known) * size, len(text) - size + 1, size):
            parent = hash((parent, text[start : start + size]))
            keys.append(parent)
        return keys

    def match(self, keys: Sequence[int], prompt: bytes) -> Hit:
        """The longest cached prefix. As in vLLM the last token is always computed, so a whole prompt is never a hit."""
        usable = min(len(keys), max(0, count(prompt) - 1) // self._block_size)
        found, tainted = 0, False
        for key in keys[:usable]:
            if key not in self._blocks:
                break
            tainted = tainted or self._blocks[key]
            found += 1
        return Hit(found * self._block_size, tainted)

    def store(self, keys: Sequence[int], tainted: bool) -> None:
        """Remember a prompt's blocks. Its tail is the first to go again, as in vLLM: heads are shared more often."""
        for key in reversed(keys):
            self._blocks[key] = self._blocks.get(key, False) or tainted
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
