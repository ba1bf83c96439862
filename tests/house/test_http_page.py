"""docs/http.md tells of every route that the port has, and of no other, and of every code that it answers with."""

import re
from pathlib import Path

from proxy.routes import ROUTES, Handler
from supervisord.core.admission import RefusalCode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/http.md").read_text()

WHO = {
    Handler.ENGINE_JSON: "an engine of the model in the JSON body",
    Handler.ENGINE_FORM: "an engine of the model in the form",
    Handler.REALTIME: "an engine of the model in the first event or the query",
    Handler.STORED: "the engine that has the response",
    Handler.HEALTH: "this port",
    Handler.MODELS: "this port",
    Handler.MODEL: "this port",
}


def test_the_table_of_routes_is_the_allow_list():
    rows = re.findall(r"^\| `(/[^`]*)` \| ([A-Z, ]+) \| (.*) \|$", PAGE, re.MULTILINE)
    told = [(path, tuple(methods.split(", ")), who) for path, methods, who in rows]
    assert sorted(told) == sorted((row.path, row.methods, WHO[row.handler]) for row in ROUTES)


def test_every_code_of_ours_is_in_the_table_of_errors():
    table = PAGE[PAGE.index("| status | code |") :]
    told = set(re.findall(r"`([a-z_]+)`", table))
    written = "\n".join(file.read_text() for file in (ROOT / "proxy").rglob("*.py"))
    ours = set(re.findall(r"ProxyError\(\s*[0-9]{3},\s*\"([a-z_]+)\"", written)) | {str(code) for code in RefusalCode}
    assert ours - told == set()
