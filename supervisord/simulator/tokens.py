"""Text and tokens. A simulated token is four bytes of UTF-8, so counts need no tokenizer and are the same everywhere.

A token id is those bytes behind a leading 1, which makes ``decode(encode(text)) == text``; ids of other tokenizers
(token-id prompts from a load generator) are taken as four bytes each.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BYTES_PER_TOKEN = 4


def count(data: bytes) -> int:
    """How many tokens ``data`` is."""
    return -(-len(data) // BYTES_PER_TOKEN)


def encode(text: str) -> list[int]:
    data = text.encode()
    return [
        int.from_bytes(b"\x01" + data[start : start + BYTES_PER_TOKEN], "big")
        for start in range(0, len(data), BYTES_PER_TOKEN)
    ]


def small_ids(data: bytes) -> list[int]:
    """One number below 2**31 per token, as who only compares tokens wants them; they cannot be decoded."""
    padded = data.ljust(count(data) * BYTES_PER_TOKEN, b"\0")
    numbers = array("I", padded)
    return numbers.tolist() if padded.isascii() else [number & 0x7FFFFFFF for number in numbers]


def ids_to_bytes(ids: Iterable[int]) -> bytes:
    parts = []
    for number in ids:
        raw = number.to_bytes(max(1, (number.bit_length() + 7) // 8), "big")
        ours = len(raw) > 1 and raw[0] == 1 and len(raw) <= BYTES_PER_TOKEN + 1
        parts.append(raw[1:] if ours else raw[-BYTES_PER_TOKEN:].rjust(BYTES_PER_TOKEN, b"\0"))
    return b"".join(parts)


def decode(ids: Iterable[int]) -> str:
    return ids_to_bytes(ids).decode(errors="replace")


def content_text(content: Any) -> str:
    """A message's content as text: a string, or a list of parts; what is no text stands in by its hash."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, sort_keys=True)
    pieces = []
    for part in content:
        if isinstance(part, str):
            pieces.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            pieces.append(part["text"])
        else:
            digest = hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
            pieces.append(f"<{part.get('type', 'part') if isinstance(part, Mapping) else 'part'}:{digest[:16]}>")
    return "".join(pieces)


def render_chat(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> bytes:
    """The prompt of a conversation, in the usual chat-template form; it starts with those of its earlier turns."""
    parts = []
    if tools:
        parts.append(f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n")
    for message in messages:
        calls = message.get("tool_calls")
        text = content_text(message.get("content")) + (json.dumps(calls) if calls else "")
        parts.append(f"<|im_start|>{message.get('role', 'user')}\n{text}<|im_end|>\n")
    parts.append("<|im_start|>assistant\n")
    return "".join(parts).encode()


_WORDS = "the engine was not real and every word of this answer came from a table and a hash of the prompt"


class Answer:
    """The deterministic answer to one prompt.

    It names the prompt (by hash) and repeats its last words, so that answers can be told apart.
    """

    GARBAGE = "GARBAGE"
    _words = tuple(_WORDS.split())

    def __init__(self, prompt: bytes, last_text: str) -> None:
        digest = hashlib.sha256(prompt).digest()
        self._digest = digest
        self._head = [f"sim-{digest.hex()[:8]}", " answers:", *(f" {word}" for word in last_text.split()[-8:]), "."]
        #: How many tokens it has when nobody sets a limit.
        self.length = len(self._head) + 16 + digest[0] % 32

    def token(self, index: int, garbage: bool) -> str:
        """The text of the token at ``index``. ``garbage``: the weights were not whole when it was made."""
        if garbage:
            noise = self._digest[index % len(self._digest)]
            return f"{'' if index == 0 else ' '}{self.GARBAGE}{noise:02x}"
        if index < len(self._head):
            return self._head[index]
        return " " + self._words[(self._digest[index % len(self._digest)] + index) % len(self._words)]

    def logprob(self, index: int, garbage: bool) -> float:
        """How likely that token was: fairly, where the weights are whole, and hardly at all where they are not."""
        chance = self._digest[index * 7 % len(self._digest)] / 256
        return -8.0 - chance if garbage else -chance
