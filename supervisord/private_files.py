"""Files that nobody else may read or change: where a configured one is, and what is in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

#: Where systemd puts what LoadCredential= and its kin name, for this unit alone.
CREDENTIALS = "CREDENTIALS_DIRECTORY"
_SCHEME = "credential:"

#: Longest file, bytes: keys and certificates are a few thousand.
_LONGEST = 1024 * 1024
#: The group may not write, the others may neither write nor read.
_NOT_ALLOWED = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH


class PrivateFileError(Exception):
    """The file cannot be used; the text says why, and what mends it."""


def is_credential(source: str) -> bool:
    """Whether it is one that systemd hands to the unit, and to nobody else."""
    return source.startswith(_SCHEME)


def locate(source: str, environ: Mapping[str, str]) -> Path:
    """Where ``/PATH`` or ``credential:NAME`` is; raises ``PrivateFileError`` for a credential of a unit without any."""
    if not is_credential(source):
        return Path(source)
    name, folder = source.removeprefix(_SCHEME), environ.get(CREDENTIALS, "")
    if not folder:
        raise PrivateFileError(
            f"cannot read: the unit has no credentials (${CREDENTIALS} is not set): give it LoadCredential={name}:/PATH"
        )
    return Path(folder, name)


def read_private(path: Path, environ: Mapping[str, str], *, secret: bool = True) -> bytes:
    """What is in the file. Raises ``PrivateFileError``, also where a ``secret`` could be read or changed by others.

    Nothing is asked of the credentials that systemd handed over: they are its work.
    """
    try:
        # Not waiting for a writer, if it should be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise PrivateFileError("cannot read: it is not a regular file")
            if secret and not _handed_over(path, environ):
                _check(status)
            data = os.read(descriptor, _LONGEST + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PrivateFileError(f"cannot read: {error.strerror or error}") from None
    if len(data) > _LONGEST:
        raise PrivateFileError(f"cannot read: it is longer than {_LONGEST} bytes")
    return data


def _handed_over(path: Path, environ: Mapping[str, str]) -> bool:
    folder = environ.get(CREDENTIALS, "")
    return bool(folder) and path.parent == Path(folder)


def _check(status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise PrivateFileError(f"is not used: it belongs to another user (uid {status.st_uid}), who can change it")
    if status.st_mode & _NOT_ALLOWED:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise PrivateFileError(f"is not used: others can read or change it (its mode is {mode}): chmod 600")
