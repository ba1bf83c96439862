"""vllmctl watch: a line or an object a change, through restarts of the daemon, until Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import signal

import pytest

from supervisord.control import Failover
from supervisord.core.states import Health, Life

#: Seconds for what takes milliseconds.
PATIENCE = 20.0


@pytest.fixture
def watching(vllmctl, hear, supervisor, bus):
    """Starts a watch in a thread; gives its stdout, and a function that waits for a text in it.

    It ends with the bus: a thread gets no Ctrl-C.
    """
    ended = []

    def start(*argv, terminal=False):
        out = hear(terminal=terminal)
        ended.append(vllmctl.behind("watch", *argv, out=out))

        def wait(text):
            supervisor.wait(out.until(text), PATIENCE)

        return out, wait

    yield start
    bus.kill()
    for future in ended:
        assert future.result(PATIENCE).code == 3


def test_json_is_a_snapshot_and_then_one_object_a_change(supervisor, control, watching):
    out, wait = watching("--json")
    wait('"snapshot"')
    supervisor.do(lambda: control.set_replica("chat-b", state=Life.WAKING, sleep_level=0, step="wake_up"))
    wait('"wake_up"')
    supervisor.do(lambda: control.fail_over(Failover("chat", "chat-a", "", "connection refused")))
    wait("connection refused")
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [record["event"] for record in records] == ["snapshot", "replica", "failover"]
    assert len(records[0]["replicas"]) == 4
    assert records[1]["name"] == "chat-b"
    assert sorted(records[1]["changed"]) == ["sleep_level", "state", "step"]
    assert records[1]["value"]["state"] == "waking"
    assert records[2] | {"time": 0} == {
        "time": 0,
        "event": "failover",
        "model": "chat",
        "source": "chat-a",
        "target": None,
        "reason": "connection refused",
    }


def test_on_a_pipe_each_change_is_a_line_in_words(supervisor, control, watching):
    out, wait = watching()
    wait("1/4 awake")
    supervisor.do(lambda: control.set_replica("chat-a", health=Health.SUSPECT))
    wait("chat-a: health ok -> suspect")
    supervisor.do(lambda: control.set_replica("embed", state=Life.WAKING, sleep_level=0, step="reload_weights"))
    wait("embed: asleep -> waking, reload weights")
    supervisor.do(lambda: control.fail_over(Failover("chat", "chat-a", "chat-b", "connection refused")))
    wait("chat: failover from chat-a to chat-b: connection refused")
    supervisor.do(lambda: control.set_replica("chat-a", in_flight=7))
    fleet = control.fleet
    fewer = dataclasses.replace(fleet, models=fleet.models[:2], replicas=fleet.replicas[:3])
    supervisor.do(lambda: control.become(fewer))
    wait("ocr-1: no longer configured")
    supervisor.do(lambda: control.become(fleet))
    wait("ocr-1: new, failed")
    assert all(line[2] == line[5] == ":" for line in out.getvalue().splitlines())
    assert "in flight" not in "".join(out.getvalue().splitlines()[1:])


def test_it_goes_on_when_the_daemon_is_restarted(supervisor, control, watching):
    _, wait = watching()
    wait("1/4 awake")
    supervisor.stop()
    wait("vllm-supervisord left the bus")
    supervisor.start()
    wait("vllm-supervisord is on the bus again: 1/4 awake")
    supervisor.do(lambda: control.set_replica("embed", state=Life.WAKING))
    wait("embed: asleep -> waking")


def test_on_a_terminal_the_table_is_redrawn_in_place(supervisor, control, watching):
    out, wait = watching(terminal=True)
    wait("asleep (level 1)")
    supervisor.do(lambda: control.set_replica("chat-b", state=Life.WAKING, sleep_level=0))
    wait("waking, 12 min")
    drawn = out.getvalue().split("\x1b[J")
    lines = drawn[1].count("\n")
    assert f"\x1b[{lines}A\r" in out.getvalue()
    supervisor.stop()
    wait("vllm-supervisord is not on the bus; waiting for it.")


def test_ctrl_c_is_how_it_ends(vllmctl, supervisor):
    process = vllmctl.process("watch", "--json")
    assert json.loads(process.stdout.readline())["event"] == "snapshot"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
