"""The state directory keeps what it was told, and every kind of trouble with it is loud and names the path."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisord.core.canary import Fingerprint
from supervisord.core.record import Phase, Record
from supervisord.core.states import Hold
from supervisord.statedir import StateDir, StateError

INVOCATION = "0123456789abcdef0123456789abcdef"
ASLEEP = Record(1, Phase.SETTLED, INVOCATION, Hold.NONE, 1000.0)
WAKING = Record(2, Phase.WAKING, INVOCATION, Hold.NONE, 2000.5)
NAMES = ["r1", "frank-medium-a", "models/a b", "größe", ".hidden", "..", "a.json", "_", "%41", "A"]


@pytest.fixture
def open_dir(tmp_path: Path) -> Iterator[Callable[[], StateDir]]:
    """Open tmp_path/state; whatever is still open at the end is closed."""
    opened: list[StateDir] = []

    def open_it() -> StateDir:
        opened.append(StateDir.open(tmp_path / "state"))
        return opened[-1]

    yield open_it
    for state in opened:
        state.close()


def run_python(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which may be killed or limited."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


async def test_what_was_saved_is_there_for_the_next_daemon(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    for number, name in enumerate(NAMES):
        await state.save(name, Record(number % 3, Phase.SETTLED, "", Hold.NONE, float(number)))
    await state.save("r1", WAKING)
    await state.save("..", None)
    await state.save("never seen", None)
    state.close()

    records = open_dir().load()
    assert sorted(records) == sorted(set(NAMES) - {".."})
    assert records["r1"] == WAKING
    assert records["A"] == Record(9 % 3, Phase.SETTLED, "", Hold.NONE, 9.0)


async def test_a_fresh_directory_is_private_and_empty(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "state"
    state = StateDir.open(path)
    try:
        assert state.load() == {}
        assert path.stat().st_mode & 0o777 == 0o700
        await state.save("r1", ASLEEP)
        await state.save_fingerprint("r1", INVOCATION, Fingerprint((" seven",), (-0.125,)))
        for folder in (path / "replicas", path / "canaries"):
            (file,) = folder.iterdir()
            assert (file.name, file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == ("r1.json", 0o600, 0o700)
    finally:
        state.close()


async def test_saves_are_done_in_the_order_of_the_calls(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    sequence = [Record(1, Phase.SETTLED, "", Hold.NONE, float(second)) for second in range(40)]
    await asyncio.gather(*(state.save("r1", record) for record in sequence), state.save("r2", ASLEEP))
    assert state.load() == {"r1": sequence[-1], "r2": ASLEEP}


async def test_the_loop_goes_on_while_the_disk_is_slow(
    open_dir: Callable[[], StateDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = open_dir()
    loop = asyncio.get_running_loop()
    entered, released = asyncio.Event(), asyncio.Event()
    real_fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(timeout=30)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    save = asyncio.create_task(state.save("r1", ASLEEP))
    await asyncio.wait_for(entered.wait(), 30)  # the loop runs, and the save is not done
    assert not save.done()
    released.set()
    await save


async def test_a_second_daemon_is_refused_and_told_which_is_first(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = StateDir.open(path)
    try:
        with pytest.raises(StateError) as caught:
            StateDir.open(path)
        assert f"cannot use the state directory {path}" in str(caught.value)
        assert f"process {os.getpid()}" in str(caught.value)
    finally:
        state.close()
    StateDir.open(path).close()  # free again, and the failed attempt left no lock


async def test_a_refused_daemon_does_not_touch_a_write_under_way(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    under_way = state.path / "replicas" / "r1.json.tmp"
    under_way.write_text("half")
    with pytest.raises(StateError):
        StateDir.open(state.path)
    assert under_way.exists()


async def test_after_close_nothing_is_saved_silently(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    state.close()
    state.close()
    with pytest.raises(StateError, match="is closed"):
        await state.save("r1", ASLEEP)


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("")
    with pytest.raises(StateError) as caught:
        StateDir.open(path)
    assert f"cannot write the state directory {path}: File exists" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="root only: makes a mount")
def test_a_read_only_file_system_is_an_error(tmp_path: Path) -> None:
    StateDir.open(tmp_path / "state").close()
    done = in_namespace(f"mount --bind -o ro {tmp_path} {tmp_path}", tmp_path / "state")
    assert f"cannot write the state directory {tmp_path / 'state'}: Read-only file system" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="root only: makes a mount")
def test_a_full_disk_is_an_error_at_start(tmp_path: Path) -> None:
    full = f"mount -t tmpfs -o size=8k none {tmp_path} && head -c 8192 /dev/zero >{tmp_path}/ballast"
    done = in_namespace(full, tmp_path / "state")
    assert f"cannot write the state directory {tmp_path / 'state'}: No space left on device" in done.stderr


def in_namespace(prepare: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Open path in a mount namespace of its own after the shell command ``prepare``."""
    opens = "import pathlib, sys; from supervisord.statedir import StateDir; StateDir.open(pathlib.Path(sys.argv[1]))"
    return subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f'{prepare}; exec "$0" -c "$1" "$2"', sys.executable, opens, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def test_a_disk_that_fills_up_fails_the_save_and_keeps_the_old_record(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    await state.save("r1", ASLEEP)
    # The same failure as a full disk, without one: no file of this process may grow past 64 bytes.
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, old_limit[1]))
    try:
        with pytest.raises(StateError) as caught:
            await state.save("r1", WAKING)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert str(caught.value).startswith(f"cannot save the state of replica r1 in {state.path}/replicas/r1.json: ")
    assert state.load() == {"r1": ASLEEP}
    assert [file.name for file in (state.path / "replicas").iterdir()] == ["r1.json"]
    await state.save("r1", WAKING)  # and it works again when there is room
    assert state.load() == {"r1": WAKING}


GOOD = {"replica": "r1", **ASLEEP.to_json()}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        (json.dumps(GOOD)[:-20], ""),
        ("\udcff\udcfe", "codec can't decode"),
        ("[]", "not a JSON object"),
        (json.dumps(GOOD | {"version": 2}), "version 2 is not the version 1"),
        (json.dumps(GOOD | {"level": "deep"}), "'level' is 'deep'"),
        (json.dumps(GOOD | {"replica": None}), "'replica' is not a name"),
        (json.dumps(GOOD | {"replica": "r2"}), "replica r2 has its state in r2.json"),
    ],
)
def test_a_file_that_cannot_be_understood_is_an_error_that_says_what_to_do(
    open_dir: Callable[[], StateDir], content: str, complaint: str
) -> None:
    state = open_dir()
    file = state.path / "replicas" / "r1.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(StateError) as caught:
        state.load()
    assert str(caught.value).startswith(f"cannot understand the state file {file}: ")
    assert complaint in str(caught.value)
    assert "remove the file" in str(caught.value)


def test_a_copy_of_a_record_under_another_name_is_an_error(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    for name in ("r1.json", "r1 (copy).json"):
        (state.path / "replicas" / name).write_text(json.dumps(GOOD))
    with pytest.raises(StateError, match=r"r1 \(copy\)\.json: it is a copy: replica r1 has its state in r1\.json"):
        state.load()


@pytest.mark.parametrize("moment", ["before the rename", "after the rename", "in the middle of the write"])
def test_a_daemon_killed_in_a_save_leaves_the_old_record_or_the_new_one(tmp_path: Path, moment: str) -> None:
    killed = run_python(
        """
        import asyncio, os, pathlib, signal, sys
        from supervisord import statedir
        from supervisord.core.record import Phase, Record
        from supervisord.core.states import Hold

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        async def main() -> None:
            state = statedir.StateDir.open(pathlib.Path(sys.argv[1]))
            await state.save("r1", Record(1, Phase.SETTLED, "", Hold.NONE, 1000.0))
            real_write = os.write
            match sys.argv[2]:
                case "before the rename":
                    pathlib.Path.rename = die
                case "after the rename":
                    statedir._sync_directory = die
                case "in the middle of the write":
                    os.write = lambda descriptor, content: (real_write(descriptor, content[:10]), die())
            await state.save("r1", Record(2, Phase.WAKING, "", Hold.NONE, 2000.0))

        asyncio.run(main())
        """,
        str(tmp_path / "state"),
        moment,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    state = StateDir.open(tmp_path / "state")
    try:
        expected = Phase.WAKING if moment == "after the rename" else Phase.SETTLED
        assert state.load()["r1"].phase is expected
        assert [file.name for file in (tmp_path / "state" / "replicas").iterdir()] == ["r1.json"]
    finally:
        state.close()
