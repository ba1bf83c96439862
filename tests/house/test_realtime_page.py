"""docs/realtime.md claims nothing without a test, and its table has every close code that the port sends."""

import re
from pathlib import Path

from proxy import websocket

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/realtime.md").read_text()


def test_every_named_test_exists():
    written = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 12
    assert named - set(re.findall(r"def (test_\w+)", written)) == set()


def test_every_close_code_is_in_the_table():
    ours = {value for name, value in vars(websocket).items() if name.isupper() and isinstance(value, int)}
    table = {int(code) for row in re.findall(r"^\| (1[0-9, ]+) \|", PAGE, re.MULTILINE) for code in row.split(", ")}
    assert table == {code for code in ours if 1001 <= code <= 1013} - {websocket.NO_CODE, websocket.ABNORMAL}
