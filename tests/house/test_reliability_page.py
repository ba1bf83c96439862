"""docs/reliability.md promises nothing without a test: every test and file that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text()


def test_every_named_test_exists():
    written = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    defined = set(re.findall(r"(?:def|class) (test_\w+|Test\w+)", written)) | set(
        re.findall(r"^(Test\w+) =", written, re.M)
    )
    named = set(re.findall(r"`(test_\w+|Test\w+)`", PAGE))
    assert len(named) > 50
    assert named - defined == set()


def test_every_named_file_exists():
    for name in re.findall(r"`((?:tests|docs|supervisord|proxy)/[\w/.]+)`", PAGE):
        assert (ROOT / name).exists(), name


def test_every_row_names_what_shows_it():
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| fault"):
            assert re.search(r"`(test_\w+|Test\w+|tests/[\w/.]+)`", line.rsplit("|", 2)[1]), line
