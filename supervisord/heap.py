"""The C library's heap, set up for the bodies of requests."""

from __future__ import annotations

#: Bytes. Blocks up to this size are taken from the heap, and twice as much stays there when all of it is free.
KEPT = 4 * 1024 * 1024


def keep_freed_memory() -> None:
    """Have glibc keep what one request's body took for the next one's, instead of giving it back to the kernel.

    glibc gives back what is free at the end of the heap, from twice the largest block on that was ever freed. A body
    takes more than that on its way through: of one of 400 kB after the other, 0.5 to 0.8 MB were given back and taken
    again each time, page by page. What it adapts to is a block that is freed (mallopt(3), M_MMAP_THRESHOLD), so one is
    freed here, whose pages nobody touched; it goes on adapting from there. Where MALLOC_... variables are set, they
    count alone, and for another C library it is a block like any other.
    """
    bytes(KEPT)
