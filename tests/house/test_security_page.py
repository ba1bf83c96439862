"""docs/security.md claims nothing without a test: every test and file that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_every_named_test_exists():
    written = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 12
    assert named - set(re.findall(r"def (test_\w+)", written)) == set()


def test_every_named_file_exists():
    for name in re.findall(r"`((?:tests|docs|units|packaging)/[\w/.]+)`", PAGE):
        assert (ROOT / name).exists(), name
