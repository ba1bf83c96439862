"""What the configuration points to is read with it: at the start, with every reload, all or nothing."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pki import Pair, pair

from supervisord.config.problems import ConfigError
from supervisord.control import ControlError, ErrorCode
from supervisord.core.spec import Config, ModelSpec, ProxySpec, ReplicaSpec, ServeSpec
from supervisord.credentials import CredentialKeeper
from supervisord.loop import Dispatcher
from supervisord.reload import Reloader

ADA, BOB = "ada-key-0123456789abcdef", "bob-key-0123456789abcdef"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(f"ada:{ADA}\n")
    return file


def configured(keys: Path | str) -> Config:
    return Config(proxy=ProxySpec(api_keys=str(keys)))


def test_keys_come_from_a_path_or_a_credential(keys):
    for source in (str(keys), "credential:keys"):
        found = CredentialKeeper({"CREDENTIALS_DIRECTORY": str(keys.parent)}).read(configured(source))
        assert found.keys is not None
        assert found.keys.owner(ADA.encode()) == "ada"
    assert CredentialKeeper({}).read(Config()).keys is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "has no keys"), (b"ada:short", "line 1: the key has 5 characters"), (b"\xff", "not UTF-8 at byte 0")],
)
def test_what_is_wrong_is_a_mistake_of_the_configuration(keys, content, reason):
    keys.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        CredentialKeeper({}).read(configured(keys))
    assert f"{keys}: [proxy] api_keys: " in str(error.value)
    assert reason in str(error.value)


def test_a_credential_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"credential:keys: \[proxy\] api_keys: cannot read: the unit has no"):
        CredentialKeeper({}).read(configured("credential:keys"))


def test_the_keys_of_engines_are_those_that_they_are_started_with():
    serve = {
        "given": ServeSpec("m", options={"api-key": "one"}),
        "listed": ServeSpec("m", options={"api-key": ["first", "second"]}),
        "by-env": ServeSpec("m", env={"VLLM_API_KEY": "two"}),
        "none": ServeSpec("m"),
    }
    models = [ModelSpec(n, (ReplicaSpec(n, n, "u", "unix:/e", True),), serve=s) for n, s in serve.items()]
    models.append(ModelSpec("own", (ReplicaSpec("own", "own", "own.service", "unix:/o"),)))
    found = CredentialKeeper({}).read(Config(models=tuple(models))).engine_keys
    assert found == {"given": "one", "listed": "first", "by-env": "two"}


@pytest.fixture
async def reloader(monkeypatch, keys):
    """A reloader of a configuration with keys, and what its keeper told of."""
    monkeypatch.setattr("supervisord.reload.SETTLE", 0.0)
    dispatcher = Dispatcher(lambda action: None, lambda note: None)
    keeper, config = CredentialKeeper({}), configured(keys)
    keeper.take(keeper.read(config))
    told: list[object] = []
    keeper.changed.append(told.append)

    def make(new: Config = config) -> Reloader:
        made = Reloader(
            config,
            lambda: new,
            dispatcher,
            SimpleNamespace(configure=lambda models: None),
            SimpleNamespace(watch=lambda units, on_change: None),
            SimpleNamespace(reloading=lambda: None, ready=lambda status: None),
            keeper,
        )
        made.begin({})
        return made

    make.keeper, make.told = keeper, told
    yield make
    dispatcher.close()


async def test_a_reload_takes_changed_keys_and_says_so(reloader: Callable[..., Reloader], keys):
    subject = reloader()
    assert await subject.reload() == []
    keys.write_text(f"ada:{ADA}\nbob:{BOB}\n")
    assert await subject.reload() == ["[proxy] api_keys: the file changed, 2 in it"]
    assert reloader.keeper.now.keys.owner(BOB.encode()) == "bob"
    assert reloader.told[-1] is reloader.keeper.now


async def test_a_reload_with_broken_keys_changes_nothing_at_all_and_says_why(reloader, keys):
    changed = Config(proxy=ProxySpec(api_keys=str(keys), max_body=1))
    subject, before = reloader(changed), reloader.keeper.now
    keys.chmod(0o644)
    with pytest.raises(ControlError, match="others can read") as error:
        await subject.reload()
    assert error.value.code is ErrorCode.CONFIG_INVALID
    assert subject.config.proxy.max_body != 1
    assert reloader.keeper.now is before
    assert reloader.told == []


class Files:
    """The two files of a certificate."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "certificate.pem", folder / "key.pem"
        self.key.touch(0o600)
        self.spec = ProxySpec(tls_certificate=str(self.certificate), tls_key=str(self.key))
        self.config = Config(proxy=self.spec)

    def write(self, made: Pair) -> None:
        self.certificate.write_bytes(made.chain)
        self.key.write_bytes(made.key)


@pytest.fixture
def files(tmp_path) -> Files:
    files = Files(tmp_path)
    files.write(pair())
    return files


@pytest.fixture
def keeper(files) -> CredentialKeeper:
    keeper = CredentialKeeper({})
    assert keeper.take(keeper.read(files.config)) == []
    return keeper


def test_a_certificate_stays_the_same_while_its_files_do(keeper, files):
    assert keeper.read(files.config).tls is keeper.now.tls
    told: list[object] = []
    keeper.changed.append(told.append)
    keeper.look_at_certificate(files.spec)
    assert told == []


def test_a_renewed_certificate_is_taken_by_a_reload_and_by_a_look(keeper, files):
    first = keeper.now.tls
    files.write(pair())
    (said,) = keeper.take(keeper.read(files.config))
    assert said.startswith("[proxy] tls_certificate: the file changed, it is valid until 20")
    second = keeper.now.tls
    files.write(pair())
    keeper.look_at_certificate(files.spec)
    assert len({id(first), id(second), id(keeper.now.tls)}) == 3


def test_half_of_a_renewal_is_told_of_once_and_the_old_one_holds_until_it_is_whole(keeper, files, caplog):
    before, renewed = keeper.now, pair()
    files.certificate.write_bytes(renewed.chain)
    for _ in range(3):
        keeper.look_at_certificate(files.spec)
    assert keeper.now is before
    (record,) = caplog.records
    assert f"{files.key}: [proxy] tls_key: does not belong to the certificate" in record.getMessage()
    with pytest.raises(ConfigError):
        keeper.read(files.config)
    files.key.write_bytes(renewed.key)
    keeper.look_at_certificate(files.spec)
    assert keeper.now.tls is not before.tls


def test_an_expired_certificate_is_used_and_warned_of(files, caplog):
    files.write(pair(begins=-9, ends=-1))
    keeper = CredentialKeeper({})
    (said,) = keeper.take(keeper.read(files.config))
    assert said.startswith("[proxy] tls_certificate has expired on ")
    assert keeper.now.tls is not None
    assert "has expired" in caplog.text


def test_a_key_that_others_can_read_is_refused_a_certificate_is_not(files):
    files.certificate.chmod(0o644)
    assert CredentialKeeper({}).read(files.config).tls is not None
    files.key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"key.pem: \[proxy\] tls_key: is not used: others can read"):
        CredentialKeeper({}).read(files.config)


def test_a_missing_file_is_named_with_its_key(files):
    files.certificate.unlink()
    with pytest.raises(ConfigError, match=r"certificate.pem: \[proxy\] tls_certificate: cannot read: No such file"):
        CredentialKeeper({}).read(files.config)


async def test_the_files_are_looked_at_by_themselves(keeper, files, monkeypatch):
    monkeypatch.setattr("supervisord.credentials.LOOK", 0.001)
    taken = asyncio.Event()
    keeper.changed.append(lambda credentials: taken.set())
    watching = asyncio.create_task(keeper.watch_certificate(lambda: files.spec))
    files.write(pair())
    await asyncio.wait_for(taken.wait(), 10)
    watching.cancel()
    await asyncio.wait([watching])
