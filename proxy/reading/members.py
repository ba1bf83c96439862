"""The members of a JSON body that routing looks at, as they stand in it, without making Python objects of the rest.

This is the quick way for what nearly every client sends: UTF-8, strict JSON, messages in a list. msgspec
walks over the text, checks its structure and gives slices. It means the same as ``json.loads`` by what both accept, and
it accepts less, with two exceptions that are asked for beforehand: it does not look at the encoding of strings that it
steps over, nor at the length of numbers. What it refuses takes the long way (see ``proxy.reading.request``).
"""

from __future__ import annotations

import re
from operator import attrgetter

import msgspec

from proxy.reading.facts import SEED_MEMBERS, Facts, Written, blocks, canonical, is_instruction, rolling_keys
from proxy.routes import Prompt

_ABSENT, _NULL = msgspec.Raw(), msgspec.Raw(b"null")

#: Digits of a number that Python does not read (sys.int_info.default_max_str_digits), and a distance that none jumps.
_ENDLESS = re.compile(rb"[0-9]{4300}")
_STRIDE = 4096
#: What follows at the least where such a number is jumped into.
_GOES_ON = re.compile(rb"[0-9]{204}")


class _Role(msgspec.Struct):
    role: object = None


class _Members(msgspec.Struct):
    model: msgspec.Raw = _ABSENT
    stream: object = False
    previous_response_id: object = ""
    background: object = False
    messages: list[msgspec.Raw] = []
    system: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    # ``SEED_MEMBERS``
    tools: msgspec.Raw = _ABSENT
    functions: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    mm_processor_kwargs: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT


_MEMBERS = msgspec.json.Decoder(_Members)
_ROLE = msgspec.json.Decoder(_Role)
_TEXT = msgspec.json.Decoder(str)
_SEED_OF = attrgetter(*SEED_MEMBERS)
_NO_SEED = (_ABSENT,) * len(SEED_MEMBERS)
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])


def read_members(data: bytes | bytearray, prompt: Prompt) -> tuple[Facts, bytes] | None:
    """The facts and the model's name as it is written (empty: none); None: it takes the long way to tell."""
    try:
        if not data.isascii():
            data.decode()
        if len(data) > _STRIDE and _has_endless_number(data):
            return None
        members = _MEMBERS.decode(data)
        model = _TEXT.decode(members.model) if members.model else None
        texts = _texts(members, prompt)
        instructions = _instructions(members, prompt, texts) if prompt is not Prompt.COMPLETION else 0
        # What is cached is then not the text as it stands (see ``proxy.reading.facts``).
        meanings = None
        if prompt is Prompt.MESSAGES or (_marked(data) and any(_marked(bytes(text)) for text in texts)):
            meanings = [canonical(msgspec.json.decode(text)) for text in texts]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    keys, sizes = rolling_keys(_seed(members), texts, meanings) if texts else ((), ())
    previous, background = "", False
    if prompt is Prompt.RESPONSES:
        previous, background = _stored(members.previous_response_id), members.background is True
    facts = Facts(
        model=model or None,
        stream=members.stream is True,
        keys=keys,
        instructions=instructions,
        sizes=sizes,
        previous=previous,
        background=background,
        messages=prompt is not Prompt.COMPLETION,
    )
    return facts, bytes(members.model)


def _stored(previous: object) -> str:
    return previous if isinstance(previous, str) else ""


def _texts(members: _Members, prompt: Prompt) -> list[Written]:
    """The parts of the prompt in the order in which the engine renders them; nothing of them is copied."""
    match prompt:
        case Prompt.CHAT:
            return [memoryview(message) for message in members.messages]
        case Prompt.MESSAGES:
            return [*_whole(members.system), *(memoryview(message) for message in members.messages)]
        case Prompt.RESPONSES:
            given = _whole(members.input)
            if given and given[0][:1] == b"[":
                given = [memoryview(item) for item in _ARRAY.decode(given[0])]
            return [*_whole(members.instructions), *given]
        case Prompt.COMPLETION:
            return blocks(memoryview(members.prompt)) if members.prompt else []
        case Prompt.NONE:
            return []


def _instructions(members: _Members, prompt: Prompt, texts: list[Written]) -> int:
    """How many of the texts, from the first, carry only instructions."""
    given = prompt in (Prompt.MESSAGES, Prompt.RESPONSES) and bool(members.system or members.instructions)
    for count, text in enumerate(texts):
        if text[:1] != b"{" or not is_instruction(_ROLE.decode(text).role):
            return max(count, given)
    return max(len(texts), given)


def _marked(data: bytes | bytearray) -> bool:
    """Whether a cache mark is mentioned. It is looked for from the end, where Python takes less than half the time."""
    return data.rfind(b'"cache_control"') >= 0


def _has_endless_number(data: bytes | bytearray) -> bool:
    """Whether there may be one."""
    for count, byte in enumerate(data[_STRIDE::_STRIDE], start=1):
        at = count * _STRIDE
        if 0x30 <= byte <= 0x39 and _GOES_ON.match(data, at) and _ENDLESS.search(data, at - _STRIDE, at + 2 * _STRIDE):
            return True
    return False


def _whole(value: msgspec.Raw) -> list[Written]:
    return [memoryview(value)] if value and value != _NULL else []


def _seed(members: _Members) -> list[bytes]:
    given = _SEED_OF(members)
    if given == _NO_SEED:
        return []
    return [b"%b\0%b" % (name.encode(), bytes(value)) for name, value in zip(SEED_MEMBERS, given, strict=True) if value]
