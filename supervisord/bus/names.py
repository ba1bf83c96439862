"""Every name that we have on the bus, and nothing else: the service, the client and the tests agree here.

The names are a contract with the outside (DESIGN: D-Bus). The ``1`` is the version of the interface: an incompatible
change gets new names beside the old ones.
"""

from __future__ import annotations

BUS_NAME = "io.github.vllmctl1"
ROOT_PATH = "/io/github/vllmctl1"
MODELS_PATH = f"{ROOT_PATH}/models"
REPLICAS_PATH = f"{ROOT_PATH}/replicas"

MANAGER_INTERFACE = f"{BUS_NAME}.Manager"
MODEL_INTERFACE = f"{BUS_NAME}.Model"
REPLICA_INTERFACE = f"{BUS_NAME}.Replica"

#: An error's name is this and an ``ErrorCode``: ``io.github.vllmctl1.Error.NoSuchModel``.
ERROR_PREFIX = f"{BUS_NAME}.Error."

_DIGITS = b"0123456789"
_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HEX = "0123456789abcdefABCDEF"


def escape(name: str) -> str:
    """``name`` as one element of an object path, the way systemd's bus_label_escape does it.

    Every byte of its UTF-8 that is no ASCII letter or digit, and a leading digit, becomes ``_`` and two hex digits;
    the empty string becomes ``_``. So ``qwen3-8b`` is ``qwen3_2d8b``.
    """
    if not name:
        return "_"
    return "".join(
        chr(byte) if byte in _LETTERS or (byte in _DIGITS and position > 0) else f"_{byte:02x}"
        for position, byte in enumerate(name.encode("utf-8", "surrogateescape"))
    )


def unescape(label: str) -> str:
    """The name that ``escape`` turned into ``label``.

    A ``_`` that is not followed by two hex digits stands for itself, as in systemd's bus_label_unescape.
    """
    if label == "_":
        return ""
    name = bytearray()
    position = 0
    while position < len(label):
        code = label[position + 1 : position + 3]
        if label[position] == "_" and len(code) == 2 and code[0] in _HEX and code[1] in _HEX:
            name.append(int(code, 16))
            position += 3
        else:
            name += label[position].encode("utf-8", "surrogateescape")
            position += 1
    return name.decode("utf-8", "surrogateescape")


def model_path(name: str) -> str:
    """The object path of the model ``name`` (its name in the configuration, not an alias)."""
    return f"{MODELS_PATH}/{escape(name)}"


def replica_path(name: str) -> str:
    """The object path of the replica ``name``."""
    return f"{REPLICAS_PATH}/{escape(name)}"
