"""Secrets are read from where only we may read them, and from nowhere else."""

import os
from pathlib import Path

import pytest

from supervisord.private_files import PrivateFileError, locate, read_private


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("what nobody else may know")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o700])
def test_a_private_file_is_read(file, mode):
    file.chmod(mode)
    assert read_private(file, {}) == b"what nobody else may know"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o660, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused_and_says_what_to_do(file, mode):
    file.chmod(mode)
    with pytest.raises(PrivateFileError, match=rf"its mode is {mode:04o}\): chmod 600"):
        read_private(file, {})
    assert read_private(file, {}, secret=False)


def test_a_file_of_another_user_is_refused(file, monkeypatch):
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    theirs = os.stat_result((0o100600, 0, 0, 1, owner + 2, 0, 0, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda fd: theirs)
    with pytest.raises(PrivateFileError, match="another user"):
        read_private(file, {})


def test_a_credential_is_systemds_matter(file):
    file.chmod(0o644)
    there = {"CREDENTIALS_DIRECTORY": str(file.parent)}
    assert locate("credential:secret", there) == file
    assert read_private(file, there) == b"what nobody else may know"
    with pytest.raises(PrivateFileError):
        read_private(file, {"CREDENTIALS_DIRECTORY": str(file.parent.parent)})


def test_without_credentials_it_says_what_the_unit_lacks():
    with pytest.raises(PrivateFileError, match="LoadCredential=keys:/PATH"):
        locate("credential:keys", {})


def test_what_is_no_file_is_refused_at_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, reason in ((pipe, "not a regular file"), (tmp_path, "not a regular file"), (tmp_path / "x", "No such")):
        with pytest.raises(PrivateFileError, match=f"cannot read: .*{reason}"):
            read_private(path, {})


def test_a_file_without_end_is_not_read_to_its_end(file):
    with file.open("wb") as long:
        long.truncate(2**20 + 1)
    with pytest.raises(PrivateFileError, match="longer than"):
        read_private(file, {})
