"""Object paths follow systemd's escaping, to the byte."""

from __future__ import annotations

import ctypes
import ctypes.util
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.bus.names import escape, model_path, replica_path, unescape


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("", "_"),
        ("abc", "abc"),
        ("Qwen3", "Qwen3"),
        ("3b", "_33b"),
        ("qwen3-8b", "qwen3_2d8b"),
        ("a_b", "a_5fb"),
        ("org/model", "org_2fmodel"),
        ("é", "_c3_a9"),
    ],
)
def test_names_become_labels_and_back(name: str, label: str) -> None:
    assert escape(name) == label
    assert unescape(label) == name


def test_paths_of_models_and_replicas() -> None:
    assert model_path("qwen3-8b") == "/io/github/vllmctl1/models/qwen3_2d8b"
    assert replica_path("7b.a") == "/io/github/vllmctl1/replicas/_37b_2ea"


@settings(deadline=None)
@given(st.text())
def test_every_name_survives_the_round_trip_and_is_a_valid_path_element(name: str) -> None:
    label = escape(name)
    assert unescape(label) == name
    assert label
    assert set(label) <= set(string.ascii_letters + string.digits + "_")


def test_a_stray_underscore_stands_for_itself() -> None:
    assert unescape("a_zz_4") == "a_zz_4"


@pytest.fixture(scope="module")
def libsystemd() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libsystemd.so.0")
    except OSError:
        pytest.skip("no libsystemd here")


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_systemd_itself_escapes_the_same_way(libsystemd: ctypes.CDLL, name: str) -> None:
    path = ctypes.c_char_p()
    assert libsystemd.sd_bus_path_encode(b"/x", name.encode(), ctypes.byref(path)) >= 0
    assert path.value is not None
    assert path.value.decode() == f"/x/{escape(name)}"
