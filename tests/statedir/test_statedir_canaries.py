"""Fingerprints are kept as records are; a state directory that is deleted under a daemon is made again, whole."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
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
ANSWER = Fingerprint((" seven", " gulls", '"\n'), (-0.125, -1.5, -9999.0))
VECTOR = Fingerprint((), (0.5, -0.25, 1e-7))


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


async def test_a_fingerprint_is_there_for_the_next_daemon_beside_the_record(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    await state.save("chat/a", ASLEEP)
    await state.save_fingerprint("chat/a", "f" * 32, VECTOR)
    await state.save_fingerprint("chat/a", INVOCATION, ANSWER)
    await state.save_fingerprint(".b", "", VECTOR)
    await state.save("chat/a", None)  # the record goes when all is well; what it answers is still true
    state.close()

    state = open_dir()
    assert state.load() == {}
    kept = state.load_fingerprints({"chat/a", ".b", "new"})
    assert sorted(kept) == [(".b", "", VECTOR), ("chat/a", INVOCATION, ANSWER)]


async def test_the_fingerprint_of_a_replica_that_is_gone_is_removed(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    await state.save_fingerprint("a", INVOCATION, ANSWER)
    await state.save_fingerprint("b", INVOCATION, ANSWER)
    assert state.load_fingerprints(["b"]) == [("b", INVOCATION, ANSWER)]
    assert [file.name for file in (state.path / "canaries").iterdir()] == ["b.json"]


GOOD = {"replica": "r1", "version": 1, "invocation": INVOCATION, "tokens": ["a"], "values": [-0.5]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "Expecting value"),
        (json.dumps(GOOD)[:-5], ""),
        ("\udcff", "codec can't decode"),
        ("[]", "not a JSON object"),
        (json.dumps(GOOD | {"version": 2}), "version 2 is not the version 1"),
        (json.dumps(GOOD | {"version": True}), "version True is not the version 1"),
        (json.dumps(GOOD | {"invocation": 7}), "'invocation' is not a text"),
        (json.dumps(GOOD | {"tokens": "a"}), "'tokens' is not a list of strings"),
        (json.dumps(GOOD | {"values": [float("nan")]}), "NaN is not a number"),
        (json.dumps(GOOD | {"replica": "r2"}), "replica r2 has its state in r2.json"),
    ],
)
def test_a_canary_file_that_cannot_be_understood_is_an_error_that_says_what_to_do(
    open_dir: Callable[[], StateDir], content: str, complaint: str
) -> None:
    state = open_dir()
    file = state.path / "canaries" / "r1.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(StateError) as caught:
        state.load_fingerprints({"r1"})
    assert str(caught.value).startswith(f"cannot understand the state file {file}: ")
    assert complaint in str(caught.value)
    assert "remove the file" in str(caught.value)
    assert state.load() == {}


def test_what_a_killed_daemon_left_of_a_write_is_removed(open_dir: Callable[[], StateDir]) -> None:
    open_dir().close()
    state = open_dir()
    leftovers = [state.path / folder / "r1.json.tmp" for folder in ("replicas", "canaries")]
    for file in leftovers:
        file.write_text("half")
    state.close()
    open_dir()
    assert not any(file.exists() for file in leftovers)


async def test_a_full_disk_fails_the_save_of_a_fingerprint_and_keeps_the_old_one(
    open_dir: Callable[[], StateDir],
) -> None:
    state = open_dir()
    await state.save_fingerprint("r1", INVOCATION, VECTOR)
    # The same failure as a full disk, without one: no file of this process may grow past 64 bytes.
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, old_limit[1]))
    try:
        with pytest.raises(StateError) as caught:
            await state.save_fingerprint("r1", INVOCATION, ANSWER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    file = state.path / "canaries" / "r1.json"
    assert str(caught.value).startswith(f"cannot save the fingerprint of replica r1 in {file}: ")
    assert state.load_fingerprints({"r1"}) == [("r1", INVOCATION, VECTOR)]


# --- deleted while running ----------------------------------------------------------------------------------------


async def fill(state: StateDir) -> None:
    await state.save("old", WAKING)
    await state.save("other", ASLEEP)
    await state.save("other", None)
    await state.save_fingerprint("old", INVOCATION, ANSWER)


@pytest.mark.parametrize("part", ["", "replicas", "canaries"])
@pytest.mark.parametrize("how", ["a record", "no record", "a fingerprint"])
async def test_a_deleted_directory_is_made_again_loudly_with_all_that_was_in_it(
    open_dir: Callable[[], StateDir], caplog: pytest.LogCaptureFixture, part: str, how: str
) -> None:
    before = open_dir()
    await fill(before)
    before.close()
    state = open_dir()  # the daemon knows by reading what it did not write itself
    state.load()
    state.load_fingerprints({"old", "new"})
    shutil.rmtree(state.path / part)
    with caplog.at_level(logging.ERROR):
        if how == "a fingerprint":
            await state.save_fingerprint("new", INVOCATION, VECTOR)
        else:
            await state.save("new", ASLEEP if how == "a record" else None)
        await state.save("newer", ASLEEP)
        await state.save_fingerprint("newer", INVOCATION, VECTOR)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"the state directory {state.path} was deleted while in use: making it again"]
    state.close()

    state = open_dir()
    assert state.load() == {"old": WAKING, "newer": ASLEEP} | ({"new": ASLEEP} if how == "a record" else {})
    kept = [("newer", INVOCATION, VECTOR), ("old", INVOCATION, ANSWER)]
    kept += [("new", INVOCATION, VECTOR)] if how == "a fingerprint" else []
    assert sorted(state.load_fingerprints({"old", "new", "newer"})) == sorted(kept)


async def test_a_directory_made_again_is_still_this_daemons_alone(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    shutil.rmtree(state.path)
    await state.save("r1", ASLEEP)
    with pytest.raises(StateError, match=f"another vllm-supervisord .process {os.getpid()}. is using it"):
        StateDir.open(state.path)
    state.close()
    StateDir.open(state.path).close()


async def test_a_directory_that_another_daemon_made_meanwhile_is_left_alone(open_dir: Callable[[], StateDir]) -> None:
    first = open_dir()
    await first.save("r1", ASLEEP)
    shutil.rmtree(first.path)
    second = open_dir()
    (second.path / "replicas").rmdir()
    with pytest.raises(StateError, match="is using it"):
        await first.save("r1", WAKING)
    first.close()
    await second.save("r2", ASLEEP)
    assert second.load() == {"r2": ASLEEP}


async def test_a_directory_that_cannot_be_made_again_fails_the_save(open_dir: Callable[[], StateDir]) -> None:
    state = open_dir()
    shutil.rmtree(state.path)
    state.path.write_text("")  # in its place
    with pytest.raises(StateError, match=r"^cannot save the state of replica r1 in .*/r1\.json: "):
        await state.save("r1", ASLEEP)
    state.path.unlink()
    await state.save("r1", WAKING)  # and it works again when it can
    assert state.load() == {"r1": WAKING}
