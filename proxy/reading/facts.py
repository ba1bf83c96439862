"""What routing may know of a request: its shape, and keys that are equal when the engine's prefix cache can be.

A key is a rolling hash over the messages, seeded by everything before them in the rendered prompt (tools, template
arguments, cache salt). ``keys[i]`` covers the messages up to and with the i-th; the last one is the whole request.
The model is not in the seed: each model has a policy of its own, and an alias asks for the same weights.

A raw prompt (``/v1/completions``) has no messages, and one that grows ends anywhere: there is a key for every whole
block of its text instead, and the rest, less than a block, is left out.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from proxy.routes import Prompt

#: Top-level members of a body that are rendered before or around the messages, or that part the engine's cache.
SEED_MEMBERS = (
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "cache_salt",
)

_key = Struct("<Q").pack
#: What every chain of hashes begins with, a secret of this process; and what the hashes have.
_SECRET, _BITS = secrets.randbits(64), 2**64 - 1

#: Text as it stands in a body.
Written = bytes | memoryview

#: Bytes of a block of a raw prompt, some 250 tokens; and how many blocks there are at most.
BLOCK, MOST_BLOCKS = 1024, 1024


class Facts(NamedTuple):
    """One request as a routing policy sees it."""

    #: The model as the client wrote it; None if it named none.
    model: str | None = None
    stream: bool = False
    #: One key per message (see above); empty where a route has no prompt of messages.
    keys: tuple[bytes, ...] = ()
    #: How many messages at the start carry only instructions (system, developer).
    instructions: int = 0
    #: Bytes of the prompt up to and with each message, as it was written: what a key covers.
    sizes: tuple[int, ...] = ()
    #: The stored response that this one goes on from, which only the replica has that made it.
    previous: str = ""
    #: Whether the engine goes on computing when the client has its answer.
    background: bool = False
    #: Whether ``model`` is an adapter's name, which no other can stand for.
    adapter: bool = False
    #: Keys are of messages: where one ends, a request can have ended. False: of blocks of a raw prompt.
    messages: bool = True

    def with_adapter(self, name: str) -> Facts:
        """The same request for an adapter, whose part of the prefix cache is its own."""
        return self._replace(adapter=True, keys=tuple([_key(hash((name, key)) & _BITS) for key in self.keys]))

    @property
    def turns(self) -> int:
        """The number of messages."""
        return len(self.keys)

    @property
    def whole(self) -> bytes | None:
        """The key of the whole request."""
        return self.keys[-1] if self.keys else None

    @property
    def opening(self) -> bytes | None:
        """The key of what stays the same through a conversation: the instructions and the first message after them."""
        if not self.messages:
            return self.whole
        return self.keys[min(self.instructions, len(self.keys) - 1)] if self.keys else None


@dataclass(slots=True)
class Value:
    """One JSON value of a body: where it stands in ``text``, and what it means."""

    text: str
    start: int
    end: int
    value: object
    #: The elements, where ``value`` is an array whose elements were asked for.
    elements: tuple[Value, ...] = ()

    @property
    def raw(self) -> str:
        """The value as it was written."""
        return self.text[self.start : self.end]

    def mentions(self, text: str) -> bool:
        """Whether ``text`` occurs in the value as it was written."""
        return self.text.find(text, self.start, self.end) >= 0


def facts_of(members: dict[str, Value], prompt: Prompt) -> Facts:
    """The facts of a JSON body, given its top-level members; raises ``ValueError`` where ``model`` is no string."""
    model = members["model"].value if "model" in members else None
    if model is not None and not isinstance(model, str):
        raise ValueError("model must be a string")
    stream = "stream" in members and members["stream"].value is True
    seed = [f"{name}\0{members[name].raw}" for name in SEED_MEMBERS if name in members]
    if prompt is Prompt.COMPLETION:
        value = members.get("prompt")
        keys, sizes = rolling_keys(seed, blocks(_bytes(value.raw))) if value is not None else ((), ())
        return Facts(model=model or None, stream=stream, keys=keys, sizes=sizes, messages=False)
    messages = _messages(members, prompt)
    # Clients move their cache_control marks to the newest message on every turn: what they mark is the same text.
    marked = any(message.mentions('"cache_control"') for message in messages)
    rewritten = marked or prompt is Prompt.MESSAGES
    instructions = 0
    for message in messages:
        if not _is_instruction(message):
            break
        instructions += 1
    if prompt in (Prompt.MESSAGES, Prompt.RESPONSES) and ("system" in members or "instructions" in members):
        instructions = max(instructions, 1)
    texts = [_bytes(message.raw) for message in messages]
    keys, sizes = rolling_keys(seed, texts, [canonical(message.value) for message in messages] if rewritten else None)
    previous, background = _stored(members) if prompt is Prompt.RESPONSES else ("", False)
    return Facts(
        model=model or None,
        stream=stream,
        previous=previous,
        background=background,
        keys=keys,
        instructions=instructions,
        sizes=sizes,
    )


def _stored(members: dict[str, Value]) -> tuple[str, bool]:
    previous = members["previous_response_id"].value if "previous_response_id" in members else ""
    background = "background" in members and members["background"].value is True
    return (previous if isinstance(previous, str) else ""), background


def rolling_keys(
    seed: Iterable[str | Written], texts: Iterable[str | Written], meanings: Iterable[Hashable] | None = None
) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """One key per text, each covering the seed and all texts up to it; and how many bytes each covers.

    ``meanings``: what counts instead of the texts as they are written, one for each.

    A hash is 64 bits of XXH3, seeded by the one before, and the first by a secret of this process: a key means nothing
    to any other. Two prompts that share one cost no more than a request that goes to a replica which has nothing of it
    cached, so the hash need not be a cryptographic one. It takes 11 us for 400 kB, where Python's own takes 109.
    """
    state, size = _SECRET, 0
    for text in seed:
        data = _bytes(text)
        state, size = xxh3_64_intdigest(data, state), size + len(data)
    state = xxh3_64_intdigest(b"", state)  # the seed ends here
    keys, sizes = [], []
    written = [_bytes(text) if isinstance(text, str) else text for text in texts]
    for data, meaning in zip(written, written if meanings is None else meanings, strict=True):
        state = xxh3_64_intdigest(data, state) if meanings is None else hash((state, meaning)) & _BITS
        size += len(data)
        keys.append(_key(state))
        sizes.append(size)
    return tuple(keys), tuple(sizes)


def _bytes(text: str | Written) -> Written:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def _messages(members: dict[str, Value], prompt: Prompt) -> list[Value]:
    """The parts of a prompt in the order in which the engine renders them."""
    match prompt:
        case Prompt.CHAT:
            return _elements(members.get("messages"))
        case Prompt.MESSAGES:
            return [*_elements(members.get("system"), whole=True), *_elements(members.get("messages"))]
        case Prompt.RESPONSES:
            return [*_elements(members.get("instructions"), whole=True), *_elements(members.get("input"))]
        case Prompt.COMPLETION | Prompt.NONE:
            return []


def blocks(prompt: Written) -> list[Written]:
    """The whole blocks of a prompt as it is written, a text or a list of tokens; none of an empty one.

    The last of very many has all the rest. What is added to a prompt is added before its last quote or bracket.
    """
    inner = prompt[1:-1] if prompt[:1] in (b'"', b"[") else prompt
    if not inner or prompt == b"null":
        return []
    count = min(max(1, len(inner) // BLOCK), MOST_BLOCKS)
    cut = [inner[at * BLOCK : (at + 1) * BLOCK] for at in range(count - 1)]
    at = (count - 1) * BLOCK
    return [*cut, inner[at:] if count in (1, MOST_BLOCKS) else inner[at : at + BLOCK]]


def _elements(value: Value | None, *, whole: bool = False) -> list[Value]:
    if value is None or value.value is None:
        return []
    return [value] if whole or not isinstance(value.value, list) else list(value.elements)


def is_instruction(role: object) -> bool:
    """Whether a message of this role carries instructions."""
    return role in ("system", "developer")


def _is_instruction(message: Value) -> bool:
    return isinstance(message.value, dict) and is_instruction(message.value.get("role"))


def canonical(value: object) -> Hashable:
    """A message without its cache marks; a text is the same as one block of text, which is how it is when marked."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        value = {**value, "content": [{"type": "text", "text": value["content"]}]}
    return _unmarked(value)


def _unmarked(value: object) -> Hashable:
    if isinstance(value, dict):
        members = [(key, _unmarked(item)) for key, item in value.items() if key != "cache_control"]
        return ("{", *sorted(members, key=itemgetter(0)))
    if isinstance(value, list):
        return ("[", *map(_unmarked, value))
    return value
