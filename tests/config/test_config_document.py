"""docs/configuration.md is made from the keys and is up to date; every key has its meaning."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.config.document import document
from supervisord.config.keys import ROOT
from supervisord.config.kinds import Key, Kind, Named, Table
from supervisord.core.spec import ProxySpec, SupervisorSpec, WakeLimits

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def _keys(kind: Kind) -> Iterator[Key]:
    if isinstance(kind, Named):
        yield from _keys(kind.table)
    if isinstance(kind, Table):
        for key in kind.keys:
            yield key
            yield from _keys(key.kind)


def test_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "run: python -m supervisord.config.document > docs/configuration.md"
    )


def test_every_key_is_on_the_page_with_its_meaning() -> None:
    page = document()
    for key in _keys(ROOT):
        assert key.doc
        assert f"{key.name}`" in page or f"{key.name}]`" in page or key.name in ("models", "memory")


@pytest.mark.parametrize(("name", "spec"), [("proxy", ProxySpec()), ("supervisor", SupervisorSpec())])
def test_keys_and_spec_have_the_same_names_and_defaults(name: str, spec: object) -> None:
    table = next(key.kind for key in ROOT.keys if key.name == name)
    assert isinstance(table, Table)
    assert {key.name: key.default for key in table.keys} == {field: getattr(spec, field) for field in spec.__slots__}


def test_wake_defaults_are_the_specs() -> None:
    wake = next(key for key in _keys(ROOT) if key.name == "wake").kind
    assert isinstance(wake, Table)
    assert {key.name: key.default for key in wake.keys} == {
        "timeout": WakeLimits().timeout,
        "max_waiting": WakeLimits().max_waiting,
        "canary": WakeLimits().canary,
    }


def test_page_says_what_callers_timeouts_must_be() -> None:
    assert "a caller's timeout must be longer than the" in document()
