"""The table of docs/realtime.md has every close code that the port sends."""

import re
from pathlib import Path

from proxy.realtime import websocket

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/realtime.md").read_text()


def test_every_close_code_is_in_the_table():
    ours = {value for name, value in vars(websocket).items() if name.isupper() and isinstance(value, int)}
    table = {int(code) for row in re.findall(r"^\| (1[0-9, ]+) \|", PAGE, re.MULTILINE) for code in row.split(", ")}
    assert table == {code for code in ours if 1001 <= code <= 1013} - {websocket.NO_CODE, websocket.ABNORMAL}
