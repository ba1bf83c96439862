"""The state directory: small JSON files, one a replica; a kill at any moment leaves the old or the new one.

    STATE_DIR/lock                  held (flock) for as long as a daemon uses the directory
    STATE_DIR/replicas/NAME.json    the record of one replica; NAME is percent-encoded
    STATE_DIR/canaries/NAME.json    what its engine answered to the canary when it first was ready
    STATE_DIR/*/*.tmp               a write under way; what a killed daemon left is removed at the next start

Trouble is never silent: an unwritable directory, a file that cannot be understood, a second daemon are all errors at
start-up, each naming the path and what to do. A directory that is deleted under a running daemon is made again with
the next save, with all that was in it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from supervisord.core.canary import Fingerprint
from supervisord.core.record import Record

log = logging.getLogger(__name__)

_SUFFIX = ".json"
_TEMPORARY = ".tmp"
#: A full disk still takes an empty file, so the probe asks for a block.
_PROBE_BYTES = 4096
#: Grows when a reader of the older form could misunderstand the newer one.
CANARY_VERSION = 1


class StateError(Exception):
    """The state directory cannot be used, read or written; the text names the path and the reason."""


class StateDir:
    """The open state directory. The saves may be called from the loop; every other method blocks (briefly)."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._replicas = path / "replicas"
        self._canaries = path / "canaries"
        self._lock = lock
        #: What every file holds, for the day on which somebody deletes them.
        self._contents: dict[Path, bytes] = {}
        # One worker: writes happen in the order in which they were asked for, and never two to one file.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="statedir")
        self._closed = False

    @classmethod
    def open(cls, path: Path) -> StateDir:
        """Create the directory if need be (0700), take it for this process and prove that it can be written.

        Raises ``StateError`` when it cannot be made or written, or when another daemon has it.
        """
        with ExitStack() as undo:
            try:
                folders = _make(path)
                lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, lock)
                _take(path, lock)
                for folder in folders:
                    for leftover in folder.glob(f"*{_TEMPORARY}"):
                        leftover.unlink()
                    _write(folder / f"probe{_TEMPORARY}", b"\0" * _PROBE_BYTES)
                    (folder / f"probe{_TEMPORARY}").unlink()
                    _sync_directory(folder)
                _sync_directory(path)
            except OSError as error:
                raise StateError(
                    f"cannot write the state directory {path}: {_reason(error)}. "
                    "It must be a directory on a writable file system with some free space, owned by the daemon's user."
                ) from error
            undo.pop_all()
        return cls(path, lock)

    def load(self) -> dict[str, Record]:
        """Every stored record by its replica's name; raises ``StateError`` for a file that is not whole and ours."""
        # Without the record it is not known whether the engine's weights are whole, so this is not ours to pass over.
        advice = "stop the replica's unit (a fresh start makes its weights whole), then remove the file"
        return {name: Record.from_json(value) for name, value in self._load(self._replicas, Record.from_json, advice)}

    def load_fingerprints(self, replicas: Collection[str]) -> list[tuple[str, str, Fingerprint]]:
        """The kept fingerprints of ``replicas``: name, invocation of the run that it is of, fingerprint.

        Those of other replicas are removed. Raises ``StateError`` as ``load`` does: what tells garbage from answers is
        not done without because of one unreadable file.
        """
        advice = "remove the file: the replica's answers of today are then taken for right"
        found = []
        for name, value in self._load(self._canaries, _fingerprint, advice):
            if name in replicas:
                found.append((name, *_fingerprint(value)))
            else:
                self._remove(self._canaries / (_encode(name) + _SUFFIX))
        return found

    async def save(self, name: str, record: Record | None) -> None:
        """Store ``record`` in the place of the replica's last one (None: none); it is safely on disk on return.

        Raises ``StateError``; then the old record is still there, or, if only the last flush failed, the new one.
        Saves are done in the order of the calls.
        """
        value = None if record is None else record.to_json()
        await self._save(f"the state of replica {name}", self._replicas, name, value)

    async def save_fingerprint(self, name: str, invocation: str, fingerprint: Fingerprint) -> None:
        """Store what the run ``invocation`` of a replica's unit answers; raises ``StateError`` as ``save`` does."""
        value = {"version": CANARY_VERSION, "invocation": invocation, **fingerprint.to_json()}
        await self._save(f"the fingerprint of replica {name}", self._canaries, name, value)

    def close(self) -> None:
        """Finish the writes that were asked for and let another daemon have the directory. Twice is harmless."""
        if not self._closed:
            self._closed = True
            self._writer.shutdown(wait=True)
            os.close(self._lock)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _load(
        self, folder: Path, check: Callable[[Mapping[str, object]], object], advice: str
    ) -> list[tuple[str, Mapping[str, object]]]:
        try:
            files = sorted(folder.glob(f"*{_SUFFIX}"))
        except OSError as error:
            raise StateError(f"cannot read the state directory {self.path}: {_reason(error)}") from error
        found = []
        for file in files:
            try:
                content = file.read_bytes()
                name, value = _named(file.name, content)
                check(value)
            except OSError as error:
                raise StateError(f"cannot read the state file {file}: {_reason(error)}") from error
            except ValueError as error:
                raise StateError(
                    f"cannot understand the state file {file}: {error}. If a newer vllm-supervisord wrote it, use that "
                    f"one; otherwise {advice}."
                ) from error
            self._contents[file] = content
            found.append((name, value))
        return found

    # --- writing, in the worker ---------------------------------------------------------------------------------------

    async def _save(self, what: str, folder: Path, name: str, value: Mapping[str, object] | None) -> None:
        if self._closed:
            raise StateError(f"cannot save {what}: the state directory {self.path} is closed")
        content = None
        if value is not None:
            content = (json.dumps({"replica": name, **value}, allow_nan=False, indent=1) + "\n").encode()
        file = folder / (_encode(name) + _SUFFIX)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._store, what, file, content)

    def _store(self, what: str, file: Path, content: bytes | None) -> None:
        try:
            try:
                _replace(file, content)
            except FileNotFoundError:
                self._make_again()
                _replace(file, content)
        except OSError as error:
            raise StateError(f"cannot save {what} in {file}: {_reason(error)}") from error
        if content is None:
            self._contents.pop(file, None)
        else:
            self._contents[file] = content

    def _remove(self, file: Path) -> None:
        self._store("nothing", file, None)

    def _make_again(self) -> None:
        """Somebody deleted the directory, or a part. What the next daemon must know is more than the save at hand."""
        log.error("the state directory %s was deleted while in use: making it again", self.path)
        _make(self.path)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # If only a part was deleted, the file is the one that is locked already.
            if not os.path.sameopenfile(lock, self._lock):
                _take(self.path, lock)
                os.dup2(lock, self._lock, inheritable=False)
        finally:
            os.close(lock)
        for file, content in self._contents.items():
            _replace(file, content)
        _sync_directory(self.path)


def _make(path: Path) -> tuple[Path, Path]:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folders = path / "replicas", path / "canaries"
    for folder in folders:
        folder.mkdir(mode=0o700, exist_ok=True)
    return folders


def _named(file_name: str, content: bytes) -> tuple[str, Mapping[str, object]]:
    """The name of the replica and the rest of the file's JSON object; raises ``ValueError``."""
    value = json.loads(content.decode(), parse_constant=_no_number)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    name = value.pop("replica", None)
    if not isinstance(name, str):
        raise ValueError("'replica' is not a name")
    if _encode(name) + _SUFFIX != file_name:
        raise ValueError(f"it is a copy: replica {name} has its state in {_encode(name)}{_SUFFIX}")
    return name, value


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _fingerprint(value: Mapping[str, object]) -> tuple[str, Fingerprint]:
    """A canary file's invocation and fingerprint; raises ``ValueError``."""
    version, invocation = value.get("version"), value.get("invocation")
    if type(version) is not int or version != CANARY_VERSION:
        raise ValueError(f"version {version!r} is not the version {CANARY_VERSION} that this program knows")
    if not isinstance(invocation, str):
        raise ValueError("'invocation' is not a text")
    return invocation, Fingerprint.from_json(value)


def _encode(name: str) -> str:
    # quote() leaves the dot alone; a leading one would hide the file from glob and from `ls`.
    encoded = quote(name, safe="@+")
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded


def _take(path: Path, lock: int) -> None:
    """Lock the directory for this process; the lock ends with the process, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise StateError(
            f"cannot use the state directory {path}: another vllm-supervisord (process {holder}) is using it. "
            "Stop that one, or give this one a directory of its own."
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _replace(file: Path, content: bytes | None) -> None:
    """Put ``content`` in the place of what the file holds, in one step (None: take the file away), durably."""
    if content is None:
        file.unlink(missing_ok=True)
    else:
        temporary = file.with_name(file.name + _TEMPORARY)
        try:
            _write(temporary, content)
            temporary.rename(file)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
    _sync_directory(file.parent)


def _write(file: Path, content: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    """Make creations, renames and removals in the directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
