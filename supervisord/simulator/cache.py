"""The KV cache: a pool of blocks that running sequences hold, and in which whole blocks are found again. Pure.

As vLLM does it: a full block has a key, chained over all before it; a sequence holds its blocks while it runs, several
may hold the same one; what nobody holds stays findable until its place is needed, the least recently used first. A
block can be found as soon as the step that computes it is planned, so those that share a prompt do not wait for the
first of them to end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from supervisord.simulator.tokens import BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Hit:
    """What of a prompt was found."""

    tokens: int
    #: The blocks were computed while the weights were not whole: what builds on them is garbage too.
    tainted: bool


@dataclass(eq=False, slots=True)
class Blocks:
    """What one sequence holds."""

    #: Keys of blocks that others can find.
    shared: list[int] = field(default_factory=list)
    #: How many blocks nobody else can find: not full yet, or full of what another block has already.
    own: int = 0
    #: How many full blocks were offered to others.
    filled: int = 0

    def __len__(self) -> int:
        return len(self.shared) + self.own


class BlockPool:
    """``capacity``: blocks that fit; ``block_size``: tokens per block (vLLM's default is 16)."""

    def __init__(self, capacity: int, block_size: int, *, caching: bool = True) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self._caching = caching
        #: Blocks that are held, and by how many; those that are not, the least recently used first.
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._tainted: set[int] = set()
        self._own = 0

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._held) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Blocks that running sequences hold."""
        return len(self._held) + self._own

    def keys(self, text: bytes, salt: str = "", known: Sequence[int] = ()) -> list[int]:
        """One key per full block; each covers all before it. ``salt`` (the request's cache_salt) enters the first.

        ``known``: the keys of the first blocks, where they were computed before.
        """
        size = self.block_size * BYTES_PER_TOKEN
        keys, parent = list(known), known[-1] if known else hash(salt)
        for start in range(len(known) * size, len(text) - size + 1, size):
            parent = hash((parent, text[start : start + size]))
            keys.append(parent)
        return keys

    def match(self, keys: Sequence[int], tokens: int) -> Hit:
        """The longest prefix that is there. As in vLLM the last token is always computed: a whole prompt never hits."""
        found, tainted = 0, False
        for key in keys[: max(0, tokens - 1) // self.block_size]:
            if key not in self._held and key not in self._idle:
                break
            tainted = tainted or key in self._tainted
            found += 1
        return Hit(found * self.block_size, tainted)

    def has_room(self, keys: Sequence[int], tokens: int) -> bool:
        """Would a sequence of ``tokens`` tokens fit beside what is held? Looking keeps nothing from making room."""
        found = self.match(keys, tokens).tokens // self.block_size
        idle = sum(1 for key in keys[:found] if key in self._idle)
        return -(-tokens // self.block_size) - found + idle <= self.capacity - self.in_use

    def take(self, keys: Sequence[int], tokens: int) -> tuple[Blocks, Hit]:
        """Hold what is there of a sequence of ``tokens`` tokens."""
        hit = self.match(keys, tokens)
        shared = list(keys[: hit.tokens // self.block_size])
        for key in shared:
            self._idle.pop(key, None)
            self._held[key] = self._held.get(key, 0) + 1
        return Blocks(shared, filled=len(shared)), hit

    def grow(self, blocks: Blocks, tokens: int, *, force: bool = False) -> bool:
        """Hold blocks for ``tokens`` tokens in all; False, and nothing happens, if there are not enough."""
        more = -(-tokens // self.block_size) - len(blocks)
        if more <= 0:
            return True
        if more > self.capacity - self.in_use and not force:
            return False
        blocks.own += more
        self._own += more
        self._make_room()
        return True

    def fill(self, blocks: Blocks, keys: Sequence[int], tokens: int, tainted: bool) -> None:
        """The first ``tokens`` tokens are computed: their full blocks can be found from now on."""
        if not self._caching:
            return
        full = min(tokens // self.block_size, len(keys), len(blocks))
        for key in keys[blocks.filled : full]:
            if key in self._held or key in self._idle:
                continue  # computed twice at the same time: the first one's is found
            self._held[key] = 1
            blocks.shared.append(key)
            blocks.own -= 1
            self._own -= 1
            if tainted:
                self._tainted.add(key)
        blocks.filled = max(blocks.filled, full)

    def free(self, blocks: Blocks) -> None:
        """Hold them no longer. Their tail is the first to make room, as in vLLM: heads are shared more often."""
        for key in reversed(blocks.shared):
            left = self._held[key] - 1
            if left:
                self._held[key] = left
            else:
                del self._held[key]
                self._idle[key] = None
        self._own -= blocks.own
        blocks.shared, blocks.own, blocks.filled = [], 0, 0
        self._make_room()

    def store(self, keys: Sequence[int], tainted: bool) -> None:
        """These blocks were computed, and nobody holds them: as far as there is room they can be found."""
        if not self._caching:
            return
        for key in reversed(keys):
            if key in self._held:
                continue
            if key not in self._idle and tainted:
                self._tainted.add(key)
            self._idle[key] = None
            self._idle.move_to_end(key)
        self._make_room()

    def clear(self) -> None:
        """Forget what nobody holds."""
        for key in list(self._idle):
            self._forget(key)

    def _make_room(self) -> None:
        while self._idle and len(self._idle) > self.capacity - self.in_use:
            self._forget(next(iter(self._idle)))

    def _forget(self, key: int) -> None:
        del self._idle[key]
        self._tainted.discard(key)
