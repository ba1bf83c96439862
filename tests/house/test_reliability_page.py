"""docs/reliability.md promises nothing without a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text()


def test_every_row_names_what_shows_it():
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| fault"):
            assert re.search(r"`(test_\w+|Test\w+|tests/[\w/.]+)`", line.rsplit("|", 2)[1]), line
