"""The state directory: one small JSON file a replica; a kill at any moment leaves the old or the new one.

    STATE_DIR/lock                  held (flock) for as long as a daemon uses the directory
    STATE_DIR/replicas/NAME.json    the record of one replica; NAME is percent-encoded
    STATE_DIR/replicas/*.tmp        a write under way; what a killed daemon left is removed at the next start

Trouble is never silent: an unwritable directory, a file that cannot be understood, a second daemon are all errors at
start-up, each naming the path and what to do.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

from supervisord.core.record import Record, RecordError

_SUFFIX = ".json"
_TEMPORARY = ".tmp"
#: A full disk still takes an empty file, so the probe asks for a block.
_PROBE_BYTES = 4096


class StateError(Exception):
    """The state directory cannot be used, read or written; the text names the path and the reason."""


class StateDir:
    """The open state directory. ``save`` may be called from the loop; every other method blocks (briefly)."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._replicas = path / "replicas"
        self._lock = lock
        # One worker: writes happen in the order in which they were asked for, and never two to one file.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="statedir")
        self._closed = False

    @classmethod
    def open(cls, path: Path) -> StateDir:
        """Create the directory if need be (0700), take it for this process and prove that it can be written.

        Raises ``StateError`` when it cannot be made or written, or when another daemon has it.
        """
        replicas = path / "replicas"
        with ExitStack() as undo:
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                replicas.mkdir(mode=0o700, exist_ok=True)
                lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, lock)
                _take(path, lock)
                for leftover in replicas.glob(f"*{_TEMPORARY}"):
                    leftover.unlink()
                _write(replicas / f"probe{_TEMPORARY}", b"\0" * _PROBE_BYTES)
                (replicas / f"probe{_TEMPORARY}").unlink()
                _sync_directory(replicas)
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
        records: dict[str, Record] = {}
        try:
            files = sorted(self._replicas.glob(f"*{_SUFFIX}"))
        except OSError as error:
            raise StateError(f"cannot read the state directory {self.path}: {_reason(error)}") from error
        for file in files:
            name, record = _read(file)
            records[name] = record
        return records

    async def save(self, name: str, record: Record | None) -> None:
        """Store ``record`` in the place of the replica's last one (None: none); it is safely on disk on return.

        Raises ``StateError``; then the old record is still there, or, if only the last flush failed, the new one.
        Saves are done in the order of the calls.
        """
        if self._closed:
            raise StateError(f"cannot save the state of replica {name}: the state directory {self.path} is closed")
        await asyncio.get_running_loop().run_in_executor(self._writer, self._save, name, record)

    def close(self) -> None:
        """Finish the writes that were asked for and let another daemon have the directory. Twice is harmless."""
        if not self._closed:
            self._closed = True
            self._writer.shutdown(wait=True)
            os.close(self._lock)

    def _save(self, name: str, record: Record | None) -> None:
        file = self._file(name)
        temporary = file.with_name(file.name + _TEMPORARY)
        try:
            if record is None:
                file.unlink(missing_ok=True)
            else:
                content = json.dumps({"replica": name, **record.to_json()}, allow_nan=False, indent=1) + "\n"
                try:
                    _write(temporary, content.encode())
                    temporary.rename(file)
                except OSError:
                    with suppress(OSError):
                        temporary.unlink()
                    raise
            _sync_directory(self._replicas)
        except OSError as error:
            raise StateError(f"cannot save the state of replica {name} in {file}: {_reason(error)}") from error

    def _file(self, name: str) -> Path:
        return self._replicas / (_encode(name) + _SUFFIX)


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


def _read(file: Path) -> tuple[str, Record]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise RecordError("not a JSON object")
        name = value.pop("replica", None)
        if not isinstance(name, str):
            raise RecordError("'replica' is not a name")
        record = Record.from_json(value)
        if _encode(name) + _SUFFIX != file.name:
            raise RecordError(f"it is a copy: replica {name} has its state in {_encode(name)}{_SUFFIX}")
    except OSError as error:
        raise StateError(f"cannot read the state file {file}: {_reason(error)}") from error
    except ValueError as error:
        # Without the record it is not known whether the engine's weights are whole, so this is not ours to pass over.
        raise StateError(
            f"cannot understand the state file {file}: {error}. If a newer vllm-supervisord wrote it, use that one; "
            "otherwise stop the replica's unit (a fresh start makes its weights whole), then remove the file."
        ) from error
    return name, record


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
