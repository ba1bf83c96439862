"""Faults at every stage at once, from a seed: the books balance, and whoever stayed was answered whole or told."""

import asyncio
import json
import random

import pytest
from proxyrig import PATIENCE, STREAM, Connection, chunk, event_stream_head, reply_bytes, request_bytes

from supervisord.core.admission import Ending, RefusalCode, Refuse

EVENTS = b"".join(b'data: {"n": %d}\n\n' % n for n in range(20))
DONE = b"data: [DONE]\n\n"


def engine_with_faults(chance: random.Random):
    async def behave(request, connection):
        stream = json.loads(request.body)["stream"]
        match chance.choice(["ok"] * 4 + ["die", "close", "busy", "half", "garbage", "hang a while"]):
            case "die":
                connection.reset()
                raise ConnectionResetError
            case "close":
                await connection.close()
                raise ConnectionResetError
            case "busy":
                await connection.send(reply_bytes(b'{"error": {"code": 503}}', "503 Service Unavailable"))
                return
            case "garbage":
                await connection.send(b"SSH-2.0-nonsense\r\n\r\n")
                connection.reset()
                raise ConnectionResetError
            case "half":
                body = event_stream_head() + chunk(EVENTS[:333]) if stream else reply_bytes(b"x" * 99)[:-9]
                await connection.send(body)
                await connection.close()
                raise ConnectionResetError
            case "hang a while":
                for _ in range(chance.randrange(20)):
                    await asyncio.sleep(0)
        if stream:
            await connection.send(event_stream_head())
            for at in range(0, len(EVENTS), 70):
                await connection.send(chunk(EVENTS[at : at + 70]))
            await connection.send(chunk(DONE) + b"0\r\n\r\n")
        else:
            await connection.send(reply_bytes(b'{"whole": true}'))

    return behave


async def one_client(rig, chance: random.Random, number: int) -> str:
    stream = chance.random() < 0.6
    model = chance.choice(["m", "m", "alias", "nobody"])
    body = request_bytes({**STREAM, "stream": stream, "model": model, "n": number, "x": "y" * chance.randrange(90_000)})
    client: Connection = await rig.connect()
    try:
        match chance.choice(["stay"] * 5 + ["leave in body", "leave at once", "leave after head"]):
            case "leave in body":
                await client.send(body[: len(body) // 2])
                return "left"
            case "leave at once":
                await client.send(body)
                return "left"
            case "leave after head":
                await client.send(body)
                await client.head()
                return "left"
        await client.send(body)
        try:
            answer = await client.response()
        except (asyncio.IncompleteReadError, ConnectionError):
            assert not stream, "a stream was cut without an error event"
            return "cut"
        if answer.status != 200:
            assert answer.status in (404, 502, 503)
            assert answer.json()["error"]["code"]
            return "refused"
        if not stream:
            assert answer.json() == {"whole": True}
        elif answer.body.endswith(DONE):
            assert answer.body == EVENTS + DONE
        else:
            assert b"[DONE]" not in answer.body
            last = answer.body.rstrip().split(b"\n\n")[-1].strip()
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_failed"
            return "told"
        return "whole"
    finally:
        client.reset() if chance.random() < 0.5 else client.writer.close()


@pytest.mark.parametrize("seed", range(4))
async def test_every_lease_comes_back_once_whatever_fails_and_every_client_learns_the_truth(rig, seed):
    print(f"seed {seed}")
    chance = random.Random(seed)
    for name in "abc":
        await rig.engine(name, engine_with_faults(chance))
    over = asyncio.Event()

    async def naps():
        while not over.is_set():
            name = chance.choice("abc")
            rig.admission.asleep.add(name)
            for _ in range(50):
                await asyncio.sleep(0)
            if chance.random() < 0.1:
                rig.admission.refuse_waiting(Refuse(RefusalCode.WAKE_FAILED, "no", 1))
            rig.admission.wake(name)

    napping = asyncio.create_task(naps())
    try:
        for _ in range(3):
            async with asyncio.timeout(6 * PATIENCE):
                ends = await asyncio.gather(*(one_client(rig, chance, number) for number in range(60)))
            print(sorted((end, ends.count(end)) for end in set(ends)))
            assert ends.count("whole") > 5
    finally:
        over.set()
        await napping
    await rig.until(lambda: not rig.admission.open and not rig.admission.waiting)
    assert {ending for _, ending in rig.admission.endings} >= {Ending.COMPLETED, Ending.CONNECT_FAILED}
