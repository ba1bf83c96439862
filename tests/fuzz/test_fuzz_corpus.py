"""The committed corpus of the fuzz targets: inputs that reached new code, and those that were findings."""

from pathlib import Path

import pytest
from targets import TARGETS

from proxy.errors import ProxyError
from proxy.http.body import Body
from proxy.reading.multipart import read_form

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_of_a_target_has_no_finding(name):
    inputs = sorted((HERE / "corpus" / name).iterdir())
    assert len(inputs) >= 20
    for file in inputs:
        try:
            TARGETS[name](file.read_bytes())
        except AssertionError as finding:
            raise AssertionError(f"{file.name}: {finding}") from finding


FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'


@pytest.mark.parametrize(
    "data",
    [
        FORM.replace(b'"model"', b'"model"model"'),
        FORM.replace(b"\r\n--b--", b"\r\n--b\1\r\nContent-Disposition: form-data\r\n\r\n\r\n--b--"),
        b"\r=" + FORM,
        b"preamble\r\n" + FORM,
        FORM.replace(b"form-data;", b"form-data;\r\n "),
        FORM.replace(b"Content-", b"Content-Disposition: form-data; name=x\r\nContent-"),
        FORM.replace(b'name="model"', b'name="model"; name="file"'),
        FORM.replace(b"\r\n\r\nm", b"\r\n\r\n" + b"m" * 5000),
    ],
)
def test_a_form_that_could_be_read_in_two_ways_is_refused(data):
    body = Body(1 << 20)
    body.append(data)
    with pytest.raises(ProxyError) as refused:
        read_form("multipart/form-data; boundary=b", body)
    assert refused.value.status == 400
