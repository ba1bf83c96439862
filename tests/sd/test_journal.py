"""Log lines with fields: the journal's native form, and plain text where there is no journal."""

import logging
import socket
import struct

import pytest

from supervisord.sd.journal import FIELDS, JournalHandler, PlainFormatter


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(10)
        handler = JournalHandler(path)
        log = logging.Logger("test.journal")
        log.addHandler(handler)
        yield log, receiver
        handler.close()


def entry(data: bytes) -> dict[str, str]:
    """Read the native protocol back."""
    fields = {}
    while data:
        name, _, rest = data.partition(b"\n")
        if b"=" in name:
            key, _, value = name.partition(b"=")
            data = rest
        else:
            (length,) = struct.unpack("<Q", rest[:8])
            key, value, data = name, rest[8 : 8 + length], rest[9 + length :]
        fields[key.decode()] = value.decode()
    return fields


def test_fields_become_journal_fields_that_can_be_searched_for(journal):
    log, receiver = journal
    log.warning("a moved", extra={FIELDS: {"event": "failover", "replica": "a", "empty": None}})
    got = entry(receiver.recv(65536))
    assert (got["VLLMCTL_EVENT"], got["VLLMCTL_REPLICA"]) == ("failover", "a")
    assert (got["MESSAGE"], got["PRIORITY"], got["SYSLOG_IDENTIFIER"]) == ("a moved", "4", "vllm-supervisord")
    assert "VLLMCTL_EMPTY" not in got


def test_a_message_of_several_lines_arrives_whole_and_forges_no_field(journal):
    log, receiver = journal
    log.error("one\nPRIORITY=0\nthree")
    got = entry(receiver.recv(65536))
    assert got["MESSAGE"] == "one\nPRIORITY=0\nthree"
    assert got["PRIORITY"] == "3"


@pytest.mark.parametrize("more", ["", "\n"])
def test_half_a_character_costs_no_line(journal, more):
    log, receiver = journal
    log.info("asked", extra={FIELDS: {"model": f"\ud800{more}"}})
    assert entry(receiver.recv(65536))["VLLMCTL_MODEL"] == f"\\ud800{more}"


def test_without_a_reader_the_line_goes_to_stderr_and_nothing_raises(tmp_path, capsys):
    handler = JournalHandler(tmp_path / "nobody")
    log = logging.Logger("test.nobody")
    log.addHandler(handler)
    log.info("still said")
    handler.close()
    assert "<6>still said" in capsys.readouterr().err


def test_plain_text_carries_each_field_once():
    record = logging.LogRecord("x", logging.INFO, "", 0, "status=200 done", (), None)
    record.fields = {"status": 200, "replica": "a"}
    assert PlainFormatter().format(record) == "INFO status=200 done replica=a"
