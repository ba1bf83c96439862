"""Certificates: what can be used, what cannot and why, and what their dates say."""

import os
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from pki import pair

from supervisord.certificates import CertificateError, make_certificate

FIRST = pair()
NOW = datetime.now(UTC)


@pytest.mark.parametrize("kind", [{}, {"old": True}, {"ends": 20_000}, {"begins": -20_000}])
def test_dates_are_read_as_another_reader_reads_them(kind):
    made = pair(**kind)
    certificate, expected = make_certificate(made.chain, made.key), x509.load_pem_x509_certificate(made.chain)
    assert certificate.not_before == expected.not_valid_before_utc
    assert certificate.not_after == expected.not_valid_after_utc
    assert certificate.trouble(NOW) == ""


@pytest.mark.parametrize(("begins", "ends", "said"), [(-9, -1, "has expired on"), (1, 9, "is not valid before")])
def test_a_certificate_that_no_client_accepts_is_told_of(begins, ends, said):
    made = pair(begins=begins, ends=ends)
    assert make_certificate(made.chain, made.key).trouble(NOW).startswith(said)
    assert make_certificate(made.chain, made.key).trouble(NOW + timedelta(days=5 if begins > 0 else -5)) == ""


@pytest.mark.parametrize(
    ("chain", "key", "of_key", "reason"),
    [
        (b"", FIRST.key, False, "not a certificate in PEM form"),
        (FIRST.key, FIRST.key, False, "not a certificate in PEM form"),
        (FIRST.chain, b"", True, "not a private key in PEM form"),
        (FIRST.chain, FIRST.chain, True, "not a private key in PEM form"),
        (FIRST.chain, pair().key, True, "does not belong to the certificate"),
        (FIRST.chain, pair(old=True).key, True, "does not belong to the certificate"),
        (FIRST.chain, pair(password=b"secret").key, True, "is encrypted"),
        (FIRST.chain[: len(FIRST.chain) // 2], FIRST.key, False, "cannot be loaded"),
        (FIRST.chain, FIRST.key[: len(FIRST.key) // 2], False, "cannot be loaded"),
    ],
)
def test_what_cannot_be_used_says_why(chain, key, of_key, reason):
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(CertificateError, match=reason) as error:
        make_certificate(chain, key)
    assert error.value.of_key is of_key
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_a_chain_and_what_stands_around_it_are_taken(tmp_path):
    made = make_certificate(b"subject=first\n" + FIRST.chain + pair("issuer").chain, FIRST.key)
    assert made.not_after == make_certificate(FIRST.chain, FIRST.key).not_after
    assert made.digest != make_certificate(FIRST.chain, FIRST.key).digest
