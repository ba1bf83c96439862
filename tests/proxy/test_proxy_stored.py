"""Responses that engines keep: asked of the replica that made them, and gone on from there only."""

import asyncio
import json

import pytest
from proxyrig import PATIENCE, chunk, event_stream_head, reply_bytes, request_bytes

from proxy.owners import Owners, response_id
from supervisord.core.admission import Ending, Running

PATH = "/v1/responses"


class Keeper:
    """An engine that keeps responses as vLLM does."""

    def __init__(self, name):
        self.name = name
        self.kept = {}
        self.asked = []

    async def __call__(self, request, connection):
        method, target, _ = request.first_line.split(" ")
        self.asked.append(f"{method} {target}")
        path = target.partition("?")[0]
        if method == "POST" and path == PATH:
            await self.create(request.json(), connection)
            return
        found = self.kept.get(path.split("/")[3])
        if found is None:
            await connection.send(reply_bytes(b'{"error":{"code":404}}', "404 Not Found"))
        elif path.endswith("/cancel"):
            found["status"] = "cancelled"
            await connection.send(reply_bytes(json.dumps(found).encode()))
        elif method == "DELETE":
            del self.kept[found["id"]]
            await connection.send(reply_bytes(b'{"deleted":true}'))
        elif "stream=true" in target:
            await connection.send(event_stream_head() + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        else:
            await connection.send(reply_bytes(json.dumps(found).encode()))

    async def create(self, body, connection):
        response = {"id": f"resp_{self.name}{len(self.kept)}", "object": "response", "status": "completed"}
        if body.get("background"):
            response["status"] = "in_progress"
        self.kept[response["id"]] = response
        if body.get("stream"):
            event = b"event: response.created\ndata: " + json.dumps({"response": response}).encode() + b"\n\n"
            await connection.send(event_stream_head() + chunk(event) + chunk(b"data: x\n\n") + b"0\r\n\r\n")
        else:
            await connection.send(reply_bytes(json.dumps(response).encode()))


@pytest.fixture
async def keepers(rig):
    """Two engines, which answer in turns."""
    made = {name: Keeper(name) for name in ("a", "b")}
    for name, keeper in made.items():
        await rig.engine(name, keeper)
    return made


async def make(rig, **fields) -> tuple[str, str]:
    """The id of a new response, and the replica that made it."""
    answer = await rig.post({"model": "m", "input": "hi", **fields}, PATH)
    assert answer.status == 200
    found = response_id(answer.body)
    assert found
    return found, answer.header("x-vllmctl-replica")


def waits_for_nothing(rig):
    return not rig.admission.open and not rig.admission.waiting


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_asked_of_the_replica_that_made_it(rig, keepers, stream):
    for _ in range(4):
        found, replica = await make(rig, stream=stream)
        for keeper in keepers.values():
            keeper.asked.clear()
        leases = len(rig.admission.finished)
        answer = await rig.get(f"{PATH}/{found}?include=x")
        assert (answer.status, answer.json()["id"]) == (200, found)
        assert answer.header("x-vllmctl-replica") == replica
        assert answer.header("x-vllmctl-route") == "owner"
        assert {name: keeper.asked for name, keeper in keepers.items() if keeper.asked} == {
            replica: [f"GET {PATH}/{found}?include=x"]
        }
        assert len(rig.admission.finished) == leases  # no lease: asking is no activity


async def test_a_response_that_was_made_before_this_process_began_is_found_by_asking(rig, keepers):
    keepers["b"].kept["resp_old"] = {"id": "resp_old", "status": "completed"}
    for _ in range(2):
        answer = await rig.get(f"{PATH}/resp_old")
        assert (answer.status, answer.header("x-vllmctl-replica")) == (200, "b")
    assert keepers["a"].asked == [f"GET {PATH}/resp_old"]  # and is known from then on


async def test_what_nobody_has_is_a_404_in_vllms_words(rig, keepers):
    answer = await rig.get(f"{PATH}/resp_none")
    assert answer.status == 404
    assert answer.json() == {
        "error": {
            "message": "Response with id 'resp_none' not found.",
            "type": "invalid_request_error",
            "param": "response_id",
            "code": 404,
        }
    }
    assert rig.admission.admitted == []


async def test_asking_wakes_nobody_and_needs_nobody_awake(rig, keepers):
    found, replica = await make(rig)
    rig.admission.asleep.update(("a", "b"))
    admitted = len(rig.admission.admitted)
    answer = await rig.get(f"{PATH}/{found}")
    assert (answer.status, answer.header("x-vllmctl-replica")) == (200, replica)
    assert len(rig.admission.admitted) == admitted


async def test_a_replica_that_was_started_anew_has_lost_its_responses(rig, keepers):
    found, replica = await make(rig)
    keepers[replica].kept.clear()
    rig.admission.runs[replica] += 1
    assert (await rig.get(f"{PATH}/{found}")).status == 404
    rig.admission.stopped.update(("a", "b"))
    for keeper in keepers.values():
        keeper.asked.clear()
    assert (await rig.get(f"{PATH}/{found}")).status == 404
    assert not any(keeper.asked for keeper in keepers.values())


async def test_a_stream_of_a_response_is_relayed_as_it_is(rig, keepers):
    found, _ = await make(rig)
    answer = await rig.get(f"{PATH}/{found}?stream=true&starting_after=1")
    assert answer.header("content-type").startswith("text/event-stream")
    assert answer.body == b"data: 1\n\ndata: 2\n\n"


async def test_cancel_and_delete_and_items_reach_the_owner(rig, keepers):
    found, replica = await make(rig)
    client = await rig.send(request_bytes(b"", f"{PATH}/{found}/cancel"))
    assert (await client.response()).json()["status"] == "cancelled"
    assert (await rig.get(f"{PATH}/{found}/input_items?limit=2")).status == 200
    assert (await rig.get(f"{PATH}/{found}", "DELETE")).json() == {"deleted": True}
    assert keepers[replica].asked[-3:] == [
        f"POST {PATH}/{found}/cancel",
        f"GET {PATH}/{found}/input_items?limit=2",
        f"DELETE {PATH}/{found}",
    ]
    assert (await rig.get(f"{PATH}/{found}")).status == 404


@pytest.mark.parametrize(
    ("method", "suffix", "allow"),
    [
        ("POST", "", "GET, DELETE, OPTIONS"),
        ("GET", "/cancel", "POST, OPTIONS"),
        ("DELETE", "/input_items", "GET, OPTIONS"),
    ],
)
async def test_other_methods_are_405(rig, method, suffix, allow):
    answer = await rig.get(f"{PATH}/resp_1{suffix}", method)
    assert (answer.status, answer.header("allow")) == (405, allow)


async def test_going_on_from_a_response_is_for_its_replica_only(rig, keepers):
    for _ in range(4):
        found, replica = await make(rig)
        _, again = await make(rig, previous_response_id=found)
        assert again == replica
        assert rig.admission.only[-1] == frozenset({replica})
    assert len({name for name, _ in rig.admission.endings}) == 2


async def test_an_alias_goes_on_from_a_response_of_its_model(rig, keepers):
    found, replica = await make(rig)
    await make(rig, model="alias", previous_response_id=found)
    assert rig.admission.only[-1] == frozenset({replica})


async def test_an_owner_that_sleeps_is_waited_for_though_another_is_awake(rig, keepers):
    found, replica = await make(rig)
    rig.admission.asleep.add(replica)
    client = await rig.send(request_bytes({"model": "m", "input": "x", "previous_response_id": found}, PATH))
    await rig.until(lambda: rig.admission.waiting)
    rig.admission.wake(replica)
    assert (await client.response()).header("x-vllmctl-replica") == replica


@pytest.mark.parametrize("previous", ["resp_lost", "", None, 5, "x/../y"])
async def test_going_on_from_what_nobody_has_is_for_the_engine_to_refuse(rig, keepers, previous):
    await make(rig, previous_response_id=previous)
    assert rig.admission.only == [None]


async def test_a_client_that_names_another_model_is_not_sent_to_the_owner(rig, keepers):
    found, _ = await make(rig)
    rig.admission.running = lambda: [Running("other", "a", rig.admission.endpoints["a"], "run 0")]
    keepers["b"].kept.clear()
    await make(rig, previous_response_id=found)
    assert rig.admission.only[-1] is None


# in the background


@pytest.fixture
def looks_at_once(monkeypatch):
    monkeypatch.setattr("proxy.stored.LOOK", 0.0)


@pytest.mark.usefixtures("looks_at_once")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_computes_in_the_background_is_in_flight_until_it_is_done(rig, keepers, stream):
    found, replica = await make(rig, background=True, stream=stream)
    await rig.until(lambda: rig.admission.finished)
    (held,) = rig.admission.open.values()
    assert (held.replica, held.reason) == (replica, "background")
    keepers[replica].kept[found]["status"] = "completed"
    await rig.until(lambda: waits_for_nothing(rig))
    assert rig.admission.endings == [(replica, Ending.COMPLETED), (replica, Ending.CLIENT_GONE)]


@pytest.mark.usefixtures("looks_at_once")
@pytest.mark.parametrize("end", ["dies", "forgets", "restarts"])
async def test_a_replica_that_is_gone_is_held_no_longer(rig, keepers, end):
    found, replica = await make(rig, background=True)
    assert len(rig.admission.open) == 1
    match end:
        case "dies":
            await rig.engines[replica].stop()
            rig.admission.stopped.add(replica)
        case "forgets":
            del keepers[replica].kept[found]
        case "restarts":
            rig.admission.runs[replica] += 1
    await rig.until(lambda: waits_for_nothing(rig))


@pytest.mark.usefixtures("looks_at_once")
@pytest.mark.parametrize("how", ["silent", "cut"])
async def test_a_replica_that_is_too_busy_to_say_how_its_background_stands_is_held_on(rig, keepers, monkeypatch, how):
    monkeypatch.setattr("proxy.stored.PATIENCE", 0.05)
    found, replica = await make(rig, background=True)
    looks = asyncio.Queue()

    async def busy(request, connection):
        await looks.put(request)
        if how == "silent":
            await connection.closed()
        connection.reset()

    rig.engines[replica].behaviour = busy
    async with asyncio.timeout(PATIENCE):
        for _ in range(4):
            await looks.get()
    assert len(rig.admission.open) == 1
    keepers[replica].kept[found]["status"] = "completed"
    rig.engines[replica].behaviour = keepers[replica]
    await rig.until(lambda: waits_for_nothing(rig))


async def test_a_shutdown_waits_for_no_background(rig, keepers):
    await make(rig, background=True)
    assert len(rig.admission.open) == 1
    async with asyncio.timeout(PATIENCE):
        await rig.proxy.stop()
    assert rig.admission.open == {}


async def test_a_replica_that_is_being_put_to_rest_is_not_held(rig, keepers):
    class Draining:
        """Lets the request itself in, and makes anybody wait who comes later."""

        def __init__(self, admission):
            self.inner = admission.admit

        def __call__(self, model, choose, **options):
            if rig.admission.open:
                rig.admission.asleep.update(("a", "b"))
            answer = self.inner(model, choose, **options)
            rig.admission.asleep.clear()
            return answer

    rig.admission.admit = Draining(rig.admission)
    await make(rig, background=True)
    await rig.until(lambda: waits_for_nothing(rig))
    assert rig.admission.abandoned == 1


# where it goes wrong


async def test_an_owner_that_cannot_be_reached_is_a_502(rig, keepers):
    found, replica = await make(rig)
    await rig.engines[replica].stop()
    answer = await rig.get(f"{PATH}/{found}")
    assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_failed")
    assert rig.failovers == []


async def test_an_engine_that_hangs_is_not_waited_for(rig, keepers, monkeypatch):
    monkeypatch.setattr("proxy.stored.PATIENCE", 0.05)
    found, replica = await make(rig)

    async def hang(request, connection):
        await connection.closed()

    rig.engines[replica].behaviour = hang
    answer = await rig.get(f"{PATH}/{found}")
    assert answer.status == 502
    assert "no answer within 0.05 s" in answer.json()["error"]["message"]
    assert (await rig.get(f"{PATH}/resp_unknown")).status == 404  # the others were asked


# the memory


def test_owners_are_bounded_and_the_least_asked_for_is_forgotten():
    place = Running("m", "a", "unix:/a", "1")
    owners = Owners(most=2)
    for name in ("one", "two"):
        owners.learn(name, place)
    assert owners.find("one", [place]) == place
    owners.learn("three", place)
    assert len(owners) == 2
    assert owners.find("two", [place]) is None
    assert owners.find("one", [place]) == place


@pytest.mark.parametrize(
    ("beginning", "expected"),
    [
        (b'{"id":"resp_1","object":"response"}', "resp_1"),
        (b' {\n "id": "resp-2"}', "resp-2"),
        (b'4f\r\nevent: response.created\ndata: {"response":{"id":"resp_3","output":[{"id":"msg_1"}]}}', "resp_3"),
        (b'data: {"type":"response.created","response": { "id" : "resp_4"', "resp_4"),
        (b'{"output":[{"id":"msg_1"}],"id":"resp_1"}', ""),
        (b'{"id":"a/b"}', ""),
        (b"", ""),
        (b'{"error":{"id":"x"}}', ""),
        (b" " * 5000 + b'{"id":"resp_1"}', ""),
    ],
)
def test_an_answer_tells_its_id_at_its_beginning(beginning, expected):
    assert response_id(beginning) == expected


@pytest.mark.parametrize(
    "previous",
    [
        "x HTTP/1.1\r\nHost: x\r\n\r\nPOST /sleep?level=2 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        "../../is_sleeping",
        "resp_1/cancel",
        "resp_1?stream=true",
        "resp_1\n",
        "r\u00e9sp",
        "\ud800",
        "x" * 257,
    ],
)
async def test_what_is_no_id_of_a_response_becomes_no_request_to_an_engine(rig, keepers, previous):
    answer = await rig.post({"model": "m", "input": "hi", "previous_response_id": previous}, PATH)
    assert answer.status == 200
    assert [asked for keeper in keepers.values() for asked in keeper.asked] == [f"POST {PATH}"]
