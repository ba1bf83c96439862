"""docs/monitoring.md says what is so: its tables are made from the code, its queries name what there is."""

import logging
import re
from pathlib import Path

from proxy.accesslog import log_request
from proxy.exchange import Finished, Outcome, Stage
from proxy.reading.usage import Usage
from supervisord.fleet_events import EVENTS
from supervisord.monitoring.catalogue import CATALOGUE, PREFIX, Kind
from supervisord.monitoring.document import filled

PAGE = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
#: Fields that say what a query shows, besides those of requests.
EVENT_FIELDS = {"EVENT", "MODEL", "REPLICA", "LEVEL", "SECONDS", "TARGET", "REQUEST_ID"}


def request_fields(caplog) -> set[str]:
    """Every field that a request's line can have."""
    outcome = Outcome(
        **{
            "status": 499,
            "code": "c",
            "model": "m",
            "replica": "a",
            "reason": "r",
            "stream": True,
            "details": ["d"],
            "key": "k",
        },
        **{"bytes_received": 1, "bytes_sent": 1, "stage": Stage.STREAM, "queued": 1.0, "attempts": 2},
        **{"first_byte": 1.0, "computed": 1.0, "close": 1000, "usage": Usage(1, 1, 1)},
    )
    with caplog.at_level(logging.INFO, "proxy.access"):
        log_request(Finished("POST", "/", "id", "::1", 0.0, 2.0), outcome)
    return {name.upper() for name in caplog.records[-1].fields}


def test_its_tables_are_up_to_date():
    assert filled(PAGE) == PAGE, "run: python -m supervisord.monitoring.document"


def test_every_field_of_a_requests_line_is_described_and_no_other(caplog):
    section = PAGE.partition("### Requests")[2].partition("### What happens")[0]
    described = {
        name for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE) for name in re.findall(r"VLLMCTL_(\w+)", row)
    }
    assert described == request_fields(caplog)


def test_every_query_names_metrics_and_fields_that_there_are(caplog):
    names = {metric.full_name for metric in CATALOGUE}
    names |= {
        f"{m.full_name}_{part}" for m in CATALOGUE if m.kind is Kind.HISTOGRAM for part in ("bucket", "sum", "count")
    }
    used = set(re.findall(rf"{PREFIX}\w+", PAGE.replace(f"`{PREFIX}...", "`")))
    assert len(used) > len(CATALOGUE)
    assert used <= names
    commands = re.findall(r"^    (journalctl .*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) > 5
    fields = {name for command in commands for name in re.findall(r"VLLMCTL_([A-Z_]+)", command)}
    assert fields <= request_fields(caplog) | EVENT_FIELDS
    assert {event for command in commands for event in re.findall(r"VLLMCTL_EVENT=(\w+)", command)} <= EVENTS.keys()
