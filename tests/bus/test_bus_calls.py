"""Every method and property, called for real; every mistake of a caller has its name."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisord.bus.names import MANAGER_INTERFACE, MODEL_INTERFACE, REPLICA_INTERFACE, ROOT_PATH
from supervisord.bus.service import BusService
from supervisord.control import ControlError, ErrorCode, Verb

MODEL_PATH = "/io/github/vllmctl1/models/qwen3_2d8b"
REPLICA_PATH = "/io/github/vllmctl1/replicas/qwen_2da"
PROPERTIES = "org.freedesktop.DBus.Properties"
ERROR = "org.freedesktop.DBus.Error."
OUR_ERROR = "io.github.vllmctl1.Error."
MACHINE_ID = Path("/etc/machine-id").read_text().strip()

MANAGER_VALUES = {
    "Version": "0.1.0",
    "Draining": False,
    "Simulated": False,
    "Status": "1/1 awake, 3 in flight, 2 waiting",
    "Listen": ["127.0.0.1:8000"],
    "ConfigFiles": ["/home/u/.config/vllm-supervisord/config.toml"],
    "StateDirectory": "/home/u/.local/state/vllm-supervisord",
}
MODEL_VALUES = {
    "Name": "qwen3-8b",
    "Aliases": ["default", "gpt-4"],
    "State": "ready",
    "Held": False,
    "Routing": "adaptive",
    "InFlight": 3,
    "Waiting": 2,
    "WaitingForKV": 1,
    "IdleSinceUSec": 0,
    "WakeUSec": 2_500_000,
    "MaxModelLen": 114_688,
    "Replicas": [REPLICA_PATH],
}
REPLICA_VALUES = {
    "Name": "qwen-a",
    "Model": "qwen3-8b",
    "ModelPath": MODEL_PATH,
    "State": "ready",
    "SleepLevel": 0,
    "Step": "",
    "Health": "ok",
    "Hold": "none",
    "Unit": "vllm@qwen-a.service",
    "Endpoint": "unix:/run/user/1000/vllm/qwen-a/engine.sock",
    "Gpus": [0, 1],
    "InFlight": 3,
    "LastError": "",
    "StateSinceUSec": 1_700_000_000_250_000,
    "IdleSinceUSec": 0,
    "WakeUSec": 2_500_000,
    "StartUSec": 41_000_000,
    "RetryAtUSec": 0,
    "MaxModelLen": 114_688,
    "ServedNames": ["qwen3-8b", "Qwen/Qwen3-8B"],
    "Simulated": False,
    "CanSleep": True,
}
OBJECTS = [
    (ROOT_PATH, MANAGER_INTERFACE, MANAGER_VALUES),
    (MODEL_PATH, MODEL_INTERFACE, MODEL_VALUES),
    (REPLICA_PATH, REPLICA_INTERFACE, REPLICA_VALUES),
]


# ---- properties ----


@pytest.mark.parametrize(("path", "interface", "values"), OBJECTS)
async def test_properties_are_read_one_by_one_and_all_at_once(
    caller: Any, path: str, interface: str, values: dict[str, Any]
) -> None:
    for name, value in values.items():
        assert await caller.get(path, interface, name) == value
        assert await caller.get(path, "", name) == value
    for asked in (interface, ""):
        [everything] = await caller.call(path, PROPERTIES, "GetAll", "s", [asked])
        assert {name: variant.value for name, variant in everything.items()} == values


async def test_the_managed_objects_are_the_models_and_replicas_with_their_values(caller: Any) -> None:
    [objects] = await caller.call(ROOT_PATH, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
    plain = {
        path: {interface: {n: v.value for n, v in values.items()} for interface, values in interfaces.items()}
        for path, interfaces in objects.items()
    }
    assert plain == {MODEL_PATH: {MODEL_INTERFACE: MODEL_VALUES}, REPLICA_PATH: {REPLICA_INTERFACE: REPLICA_VALUES}}


async def test_a_reader_sees_the_newest_state_at_once(caller: Any, control: Any) -> None:
    for number in range(20):
        control.set_replica(in_flight=number)
        assert await caller.get(REPLICA_PATH, REPLICA_INTERFACE, "InFlight") == number


async def test_text_that_dbus_forbids_is_cleaned_instead_of_costing_us_the_bus(caller: Any, control: Any) -> None:
    control.set_replica(last_error="died: \0\udcff end")
    assert await caller.get(REPLICA_PATH, REPLICA_INTERFACE, "LastError") == "died: ? end"


# ---- our methods ----


async def test_models_and_replicas_are_listed(caller: Any) -> None:
    assert await caller.call(ROOT_PATH, MANAGER_INTERFACE, "ListModels") == [[["qwen3-8b", "ready", 3, 2, MODEL_PATH]]]
    assert await caller.call(ROOT_PATH, MANAGER_INTERFACE, "ListReplicas") == [
        [["qwen-a", "qwen3-8b", "ready", "ok", "vllm@qwen-a.service", REPLICA_PATH]]
    ]


async def test_a_model_is_found_by_name_and_by_alias_and_a_name_goes_first(caller: Any, control: Any) -> None:
    for name in ("qwen3-8b", "default", "gpt-4"):
        assert await caller.call(ROOT_PATH, MANAGER_INTERFACE, "GetModel", "s", [name]) == [MODEL_PATH]
    other = dataclasses.replace(control.fleet.models[0], name="gpt-4", aliases=(), replicas=())
    control.become(dataclasses.replace(control.fleet, models=(*control.fleet.models, other)))
    assert await caller.call(ROOT_PATH, MANAGER_INTERFACE, "GetModel", "s", ["gpt-4"]) == [
        "/io/github/vllmctl1/models/gpt_2d4"
    ]


async def test_a_replica_is_found_by_name(caller: Any) -> None:
    assert await caller.call(ROOT_PATH, MANAGER_INTERFACE, "GetReplica", "s", ["qwen-a"]) == [REPLICA_PATH]


@pytest.mark.parametrize(
    ("member", "code", "text"),
    [
        ("GetModel", ErrorCode.NO_SUCH_MODEL, "there is no model 'x'; configured: qwen3-8b"),
        ("GetReplica", ErrorCode.NO_SUCH_REPLICA, "there is no replica 'x'; configured: qwen-a"),
    ],
)
async def test_an_unknown_name_is_our_error_and_tells_the_known_ones(
    caller: Any, remote_error: Any, member: str, code: ErrorCode, text: str
) -> None:
    with pytest.raises(remote_error) as raised:
        await caller.call(ROOT_PATH, MANAGER_INTERFACE, member, "s", ["x"])
    assert (raised.value.name, raised.value.text) == (OUR_ERROR + code, text)


async def test_a_model_explains_where_a_request_would_go(caller: Any, control: Any, remote_error: Any) -> None:
    replica, reason, bids = await caller.call(MODEL_PATH, MODEL_INTERFACE, "ExplainRoute", "say", ["/v1/x", b"{}"])
    assert (replica, reason) == ("qwen-a", "qwen3-8b at /v1/x: {}")
    assert bids == [["qwen-a", 0.31, 0.0, 0.29, 89_700], ["qwen-b", 5.42, 1.0, 4.4, 0]]
    control.outcome = ControlError(ErrorCode.INVALID_ARGUMENT, "the request body must be a JSON object")
    with pytest.raises(remote_error, match="must be a JSON object") as raised:
        await caller.call(MODEL_PATH, MODEL_INTERFACE, "ExplainRoute", "say", ["/v1/x", b"[]"])
    assert raised.value.name == f"{OUR_ERROR}InvalidArgument"


async def test_reload_answers_what_changed(caller: Any, control: Any) -> None:
    control.reload_result = ("model 'x' was added", "proxy.keepalive is 5s")
    assert await caller.call(ROOT_PATH, MANAGER_INTERFACE, "Reload") == [
        ["model 'x' was added", "proxy.keepalive is 5s"]
    ]


@pytest.mark.parametrize(
    ("path", "interface", "target", "verbs"),
    [
        (MODEL_PATH, MODEL_INTERFACE, "model qwen3-8b", (Verb.WAKE, Verb.START, Verb.STOP, Verb.RESTART)),
        (
            REPLICA_PATH,
            REPLICA_INTERFACE,
            "replica qwen-a",
            (Verb.WAKE, Verb.START, Verb.STOP, Verb.RESTART, Verb.DRAIN),
        ),
    ],
)
async def test_every_verb_reaches_the_supervisor(
    caller: Any, control: Any, path: str, interface: str, target: str, verbs: tuple[Verb, ...]
) -> None:
    for verb in verbs:
        assert await caller.call(path, interface, verb.value.capitalize()) == []
    for level in (1, 2):
        assert await caller.call(path, interface, "Sleep", "u", [level]) == []
    assert control.commands == [
        *((target, verb, 0) for verb in verbs),
        (target, Verb.SLEEP, 1),
        (target, Verb.SLEEP, 2),
    ]


@pytest.mark.parametrize("level", [0, 3, 2**32 - 1])
async def test_there_are_two_sleep_levels(caller: Any, control: Any, remote_error: Any, level: int) -> None:
    with pytest.raises(remote_error) as raised:
        await caller.call(MODEL_PATH, MODEL_INTERFACE, "Sleep", "u", [level])
    assert raised.value.name == OUR_ERROR + "InvalidArgument"
    assert raised.value.text == f"cannot put qwen3-8b to sleep at level {level}: the levels are 1 and 2"
    assert control.commands == []


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_a_failed_command_is_an_error_of_our_name_with_its_text(
    caller: Any, control: Any, remote_error: Any, code: ErrorCode
) -> None:
    control.outcome = ControlError(code, "cannot do that: reasons\0")
    for path, interface, member in (
        (REPLICA_PATH, REPLICA_INTERFACE, "Wake"),
        (ROOT_PATH, MANAGER_INTERFACE, "Reload"),
    ):
        with pytest.raises(remote_error) as raised:
            await caller.call(path, interface, member)
        assert (raised.value.name, raised.value.text) == (OUR_ERROR + code, "cannot do that: reasons")


async def test_a_defect_is_an_internal_error_with_its_traceback_in_the_log_only(
    caller: Any, control: Any, remote_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    control.outcome = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR), pytest.raises(remote_error) as raised:
        await caller.call(REPLICA_PATH, REPLICA_INTERFACE, "Wake")
    assert raised.value.name == OUR_ERROR + "Internal"
    assert raised.value.text == "cannot finish Wake: ZeroDivisionError inside vllm-supervisord, see its log"
    [record] = caplog.records
    assert record.exc_info is not None
    assert "secret detail" in caplog.text


# ---- work that takes long ----


async def test_a_method_answers_when_the_work_is_done_and_holds_up_nobody(caller: Any, control: Any) -> None:
    control.gate.clear()
    slow = [asyncio.create_task(caller.call(REPLICA_PATH, REPLICA_INTERFACE, "Wake")) for _ in range(50)]
    for _ in slow:
        await control.begun.acquire()
    assert await caller.get(REPLICA_PATH, REPLICA_INTERFACE, "State") == "ready"
    assert not any(task.done() for task in slow)
    control.gate.set()
    assert await asyncio.gather(*slow) == [[]] * 50


async def test_the_work_of_a_caller_that_vanished_is_finished(
    service: BusService, connect: Callable[[], Any], control: Any
) -> None:
    control.gate.clear()
    impatient, patient = await connect(), await connect()
    gone = asyncio.create_task(impatient.call(REPLICA_PATH, REPLICA_INTERFACE, "Start"))
    await control.begun.acquire()
    gone.cancel()
    await asyncio.wait([gone])
    await impatient.close()
    assert await patient.get(REPLICA_PATH, REPLICA_INTERFACE, "State") == "ready"
    control.gate.set()
    await control.finished.wait()
    assert await patient.get(REPLICA_PATH, REPLICA_INTERFACE, "State") == "ready"


async def test_a_call_that_wants_no_answer_gets_none_and_is_done(caller: Any, control: Any) -> None:
    await caller.post(REPLICA_PATH, REPLICA_INTERFACE, "Drain")
    await control.begun.acquire()
    assert control.commands == [("replica qwen-a", Verb.DRAIN, 0)]
    assert await caller.get(REPLICA_PATH, REPLICA_INTERFACE, "State") == "ready"


# ---- mistakes of callers ----


@pytest.mark.parametrize(
    ("path", "interface", "member", "signature", "body", "error"),
    [
        ("/nowhere", MODEL_INTERFACE, "Wake", "", [], "UnknownObject"),
        (MODEL_PATH + "x", MODEL_INTERFACE, "Wake", "", [], "UnknownObject"),
        ("/nowhere", "org.freedesktop.DBus.Introspectable", "Introspect", "", [], "UnknownObject"),
        ("/nowhere", PROPERTIES, "GetAll", "s", [MODEL_INTERFACE], "UnknownObject"),
        (MODEL_PATH, REPLICA_INTERFACE, "Wake", "", [], "UnknownInterface"),
        (MODEL_PATH, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", "", [], "UnknownInterface"),
        (MODEL_PATH, MODEL_INTERFACE, "Dream", "", [], "UnknownMethod"),
        (MODEL_PATH, None, "Dream", "", [], "UnknownMethod"),
        (MODEL_PATH, MODEL_INTERFACE, "Drain", "", [], "UnknownMethod"),
        (MODEL_PATH, MODEL_INTERFACE, "Sleep", "", [], "InvalidArgs"),
        (MODEL_PATH, MODEL_INTERFACE, "Sleep", "i", [1], "InvalidArgs"),
        (MODEL_PATH, MODEL_INTERFACE, "Wake", "s", ["now"], "InvalidArgs"),
        (ROOT_PATH, MANAGER_INTERFACE, "GetModel", "ss", ["a", "b"], "InvalidArgs"),
        (MODEL_PATH, PROPERTIES, "Get", "s", ["State"], "InvalidArgs"),
        (MODEL_PATH, PROPERTIES, "Get", "ss", [MODEL_INTERFACE, "Mood"], "UnknownProperty"),
        (MODEL_PATH, PROPERTIES, "Get", "ss", [PROPERTIES, "State"], "UnknownProperty"),
        (MODEL_PATH, PROPERTIES, "Get", "ss", [REPLICA_INTERFACE, "State"], "UnknownInterface"),
        (MODEL_PATH, PROPERTIES, "GetAll", "s", ["org.example.Nothing"], "UnknownInterface"),
    ],
)
async def test_mistakes_have_the_specifications_names(
    caller: Any,
    control: Any,
    remote_error: Any,
    path: str,
    interface: str | None,
    member: str,
    signature: str,
    body: list[Any],
    error: str,
) -> None:
    with pytest.raises(remote_error) as raised:
        await caller.call(path, interface, member, signature, body)
    assert raised.value.name == ERROR + error
    assert control.commands == []


@pytest.mark.parametrize(("path", "interface", "values"), OBJECTS)
async def test_no_property_can_be_set(
    caller: Any, remote_error: Any, variant: Any, path: str, interface: str, values: dict[str, Any]
) -> None:
    for name in values:
        with pytest.raises(remote_error) as raised:
            await caller.call(path, PROPERTIES, "Set", "ssv", [interface, name, variant("s", "x")])
        assert raised.value.name == ERROR + "PropertyReadOnly"
    with pytest.raises(remote_error) as raised:
        await caller.call(path, PROPERTIES, "Set", "ssv", [interface, "Mood", variant("s", "x")])
    assert raised.value.name == ERROR + "UnknownProperty"


# ---- the specification's interfaces ----


async def test_a_call_may_leave_the_interface_out(caller: Any, control: Any) -> None:
    assert await caller.call(REPLICA_PATH, None, "Drain") == []
    assert await caller.call(REPLICA_PATH, None, "Ping") == []
    assert control.commands == [("replica qwen-a", Verb.DRAIN, 0)]


@pytest.mark.parametrize("path", ["/", ROOT_PATH, "/io/github", REPLICA_PATH])
async def test_peers_are_answered_on_every_node(caller: Any, path: str) -> None:
    assert await caller.call(path, "org.freedesktop.DBus.Peer", "Ping") == []
    [machine] = await caller.call(path, "org.freedesktop.DBus.Peer", "GetMachineId")
    assert machine == MACHINE_ID


async def test_standard_interfaces_have_no_properties(caller: Any) -> None:
    assert await caller.call(MODEL_PATH, PROPERTIES, "GetAll", "s", [PROPERTIES]) == [{}]


async def test_the_tree_can_be_walked_from_the_top(caller: Any) -> None:
    for path, child in (
        ("/", "io"),
        ("/io", "github"),
        ("/io/github", "vllmctl1"),
        (ROOT_PATH, "models"),
        (ROOT_PATH, "replicas"),
        (ROOT_PATH + "/models", "qwen3_2d8b"),
        (ROOT_PATH + "/replicas", "qwen_2da"),
    ):
        [text] = await caller.call(path, "org.freedesktop.DBus.Introspectable", "Introspect")
        assert f'<node name="{child}" />' in text
