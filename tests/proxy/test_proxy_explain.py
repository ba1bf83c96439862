"""Explaining a route: the next choice, without sending, counting or waking anything."""

import json

import pytest
from proxyrig import CHAT

from supervisord.control import ControlError, ErrorCode

PATH = "/v1/chat/completions"
BODY = json.dumps(CHAT).encode()


async def test_it_is_what_the_next_request_is_told(rig):
    await rig.engine("a")
    await rig.engine("b")
    await rig.post()
    for _ in range(3):
        told = rig.proxy.explain("alias", PATH, BODY)
    assert len(rig.admission.admitted) == 1
    answer = await rig.post()
    assert (answer.header("x-vllmctl-replica"), answer.header("x-vllmctl-route")) == (told.replica, told.reason)


async def test_a_model_of_which_nobody_is_awake_is_not_woken(rig):
    await rig.engine("a")
    rig.admission.asleep.add("a")
    told = rig.proxy.explain("m", PATH, BODY)
    assert told.replica == ""
    assert "no replica can have it now" in told.reason
    assert not rig.admission.waiting
    rig.admission.asleep.clear()


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (PATH, b"[1]", "must be a JSON object"),
        (PATH, b"{", "cannot parse the request body as JSON"),
        ("/sleep", b"{}", "Unknown request URL"),
        ("/v1/models", b"{}", "not allowed"),
        ("/v1/audio/transcriptions", b"{}", "takes no JSON"),
    ],
)
async def test_what_no_request_could_be_is_refused(rig, path, body, why):
    with pytest.raises(ControlError) as refused:
        rig.proxy.explain("m", path, body)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert why in str(refused.value)
