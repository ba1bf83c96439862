"""API keys and a certificate as credentials of the real unit: systemd hands them over, the port uses them."""

import asyncio
import json
import sys
from functools import partial
from pathlib import Path

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from pki import Pair, pair
from product import SERVICE, codes, model, run, show, systemctl, until

ADA, BOB = "ada-key-0123456789abcdef", "bob-key-0123456789abcdef"
CONFIG = model("kept")


@pytest.fixture
def ask(product):
    """The status that a request with this key gets."""

    async def ask(key: str = "", name: str = "kept") -> int:
        async with product.clients() as clients:
            body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            headers = {"x-api-key": key} if key else {}
            url = f"{clients.url}/v1/chat/completions"
            async with clients._session.post(url, json=body, headers=headers) as response:
                return response.status

    return ask


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(f"ada:{ADA}\n")
    return file


@pytest.fixture
async def restored(product):
    yield
    product.configure(CONFIG)
    await product.vllmctl("reload")


async def test_a_credential_of_the_unit_guards_the_port(product, fleet, ask, keys, restored):
    async with product.drop_in(SERVICE, f"[Service]\nLoadCredential=api_keys:{keys}\n"):
        product.configure('[proxy]\napi_keys = "credential:api_keys"\n' + CONFIG)
        systemctl("restart", SERVICE)
        assert await ask() == 401
        assert await ask("wrong-key-0123456789abc") == 401
        states = json.loads(await product.vllmctl("status", "--json"))["replicas"]
        assert [replica["state"] for replica in states] == ["stopped"]  # strangers wake nobody
        assert await ask(ADA) == 200
        await until(lambda: "key=ada" in product.log(), "the request's line")
        # What systemd handed over is a copy of the unit's start: a reload reads that one again.
        keys.write_text(f"bob:{BOB}\n")
        await product.vllmctl("reload")
        assert (await ask(ADA), await ask(BOB)) == (200, 401)
        systemctl("restart", SERVICE)
        assert (await ask(ADA), await ask(BOB)) == (401, 200)
        product.configure(CONFIG)
    systemctl("restart", SERVICE)
    assert ADA not in product.log()


async def test_keys_in_a_file_are_changed_without_a_restart(product, fleet, ask, keys, restored):
    product.configure(f'[proxy]\napi_keys = "{keys}"\n' + CONFIG)
    assert "api_keys changed" in await product.vllmctl("reload")
    pid = product.main_pid()
    assert (await ask(), await ask(ADA)) == (401, 200)
    keys.write_text(f"bob:{BOB}\n")
    assert "api_keys" in await product.vllmctl("reload")
    assert (await ask(ADA), await ask(BOB)) == (401, 200)
    keys.chmod(0o644)
    assert "others can read" in await product.vllmctl("reload", code=6)
    assert (await ask(ADA), await ask(BOB)) == (401, 200)
    assert product.main_pid() == pid


async def test_the_key_of_the_engines_is_changed_and_nobody_is_refused_by_one_that_has_the_old_one(
    product, fleet, keys, restored
):
    async def take(key: str) -> None:
        product.configure(f'[proxy]\napi_keys = "{keys}"\n' + model("kept", "kept-a", "kept-b", api_key=key))
        await product.vllmctl("reload")

    await take("engine-key-1")
    await product.vllmctl("up", "model:kept")
    runs = {name: product.log(name).count("Starting vLLM API server") for name in ("kept-a", "kept-b")}
    async with product.clients(headers={"x-api-key": ADA}) as clients, clients.load("kept", 4, tokens=20) as load:
        await load.more(4)
        for key in ("engine-key-2", ""):
            await take(key)
            for name in runs:
                runs[name] += 1
                started = partial(_has_started, product, name, runs[name])
                await until(started, f"{name} has the key {key!r}")
                await fleet.becomes(name, "ready")
            await load.more(4)
    assert codes(load.answers) == {"whole": len(load.answers)}


def _has_started(product, name: str, times: int) -> bool:
    return product.log(name).count("Starting vLLM API server") >= times


async def test_a_missing_credential_is_said_and_not_tried_again(product, restored):
    product.configure('[proxy]\napi_keys = "credential:api_keys"\n' + CONFIG)
    systemctl("restart", SERVICE, check=False)
    assert show(SERVICE, "ActiveState", "ExecMainStatus") == {"ActiveState": "failed", "ExecMainStatus": "78"}
    assert "give it LoadCredential=api_keys:/PATH" in product.log()
    product.configure(CONFIG)
    systemctl("reset-failed")
    product.start()


@pytest.fixture
def certificate(tmp_path: Path):
    """Writes the two files of a certificate; returns the settings that name them."""

    def certificate(made: Pair) -> str:
        for name, data in (("certificate", made.chain), ("key", made.key)):
            file = tmp_path / name
            file.touch(0o600)
            file.write_bytes(data)
        return f'tls_certificate = "{tmp_path}/certificate"\ntls_key = "{tmp_path}/key"\n'

    return certificate


async def health(product, trusted: Pair) -> int:
    url = f"https://127.0.0.1:{product.port}/health"
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        session.get(url, ssl=trusted.client()) as response,
    ):
        return response.status


async def test_tls_from_credentials_on_the_socket_of_systemd(product, fleet, certificate, tmp_path, restored):
    made = pair()
    certificate(made)
    loaded = "".join(f"LoadCredential=tls_{name}:{tmp_path}/{name}\n" for name in ("certificate", "key"))
    settings = '[proxy]\ntls_certificate = "credential:tls_certificate"\ntls_key = "credential:tls_key"\n'
    async with product.drop_in(SERVICE, f"[Service]\n{loaded}"):
        product.configure(settings + CONFIG)
        systemctl("restart", SERVICE)
        assert await health(product, made) == 200
        product.configure(CONFIG)
    systemctl("restart", SERVICE)


async def test_a_certificate_is_renewed_without_a_restart(product, fleet, certificate, tmp_path, restored):
    first, second = pair(), pair()
    product.configure(f"[proxy]\n{certificate(first)}" + CONFIG)
    await product.vllmctl("reload")
    pid = product.main_pid()
    assert await health(product, first) == 200
    certificate(Pair(second.chain, first.key))
    assert "does not belong to the certificate" in await product.vllmctl("reload", code=6)
    assert await health(product, first) == 200
    certificate(second)
    assert "tls_certificate: the file changed" in await product.vllmctl("reload")
    assert await health(product, second) == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await health(product, first)
    assert product.main_pid() == pid


async def test_restarts_over_tls_refuse_nobody_and_cut_no_answer(product, fleet, certificate, restored):
    made = pair()
    product.configure(f"[proxy]\n{certificate(made)}" + CONFIG)
    await product.vllmctl("reload")
    pids = set()
    async with (
        product.clients(made.client()) as clients,
        clients.load("kept", 4, tokens=20) as whole_answers,
        clients.load("kept", 4, tokens=60, stream=True) as streams,
    ):
        for _ in range(2):
            await asyncio.gather(whole_answers.more(4), streams.more(4))
            status, _, err = await run("systemctl", "--user", "restart", SERVICE)
            assert status == 0, err
            pids.add(product.main_pid())
        await asyncio.gather(whole_answers.more(4), streams.more(4))
    assert len(pids) == 2
    answers = whole_answers.answers + streams.answers
    assert codes(answers) == {"whole": len(answers)}


async def test_a_benchmark_gets_through_a_guarded_port_and_says_how(
    product, fleet, certificate, keys, tmp_path, restored
):
    product.configure(f'[proxy]\napi_keys = "{keys}"\n{certificate(pair())}' + model("kept", "kept-a", "kept-b"))
    await product.vllmctl("reload")
    ask = ("bench", "routing", "kept", "--tokens", "300", "--burst", "2", "--turns", "2", "--policies", "prefill")
    https = ("--url", f"https://localhost:{product.port}")
    assert "--url https://NAME:PORT" in await product.vllmctl(*ask, code=1)
    assert "SSL_CERT_FILE=" in await product.vllmctl(*ask, *https, code=1)
    trusting = {"SSL_CERT_FILE": str(tmp_path / "certificate")}
    assert "OPENAI_API_KEY=KEY" in await product.vllmctl(*ask, *https, code=1, env=trusting)
    said = await product.vllmctl(*ask, *https, "--json", env={**trusting, "OPENAI_API_KEY": ADA})
    assert json.loads(said)["policies"][0]["errors"] == []
