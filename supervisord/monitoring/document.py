"""The tables of docs/monitoring.md: ``python -m supervisord.monitoring.document`` writes them into the page."""

from __future__ import annotations

import re
from pathlib import Path

from supervisord.fleet_events import EVENTS
from supervisord.monitoring.catalogue import CATALOGUE

PAGE = Path("docs/monitoring.md")
_HEAD = "| metric | kind | labels | meaning |\n|---|---|---|---|\n"
_EVENTS_HEAD = "| `VLLMCTL_EVENT=` | counter (`vllm_supervisord_..._total`) |\n|---|---|\n"


def metrics_table() -> str:
    """Every metric, a row each."""
    rows = []
    for metric in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |\n")
    return _HEAD + "".join(rows)


def events_table() -> str:
    """Every event of the journal, and the counter of its lines."""
    return _EVENTS_HEAD + "".join(f"| `{event}` | `{row.name}` |\n" for event, row in EVENTS.items())


def filled(page: str) -> str:
    """The page with its tables as they must be."""
    return _filled(_filled(page, "metrics", metrics_table()), "events", events_table())


def _filled(page: str, name: str, table: str) -> str:
    between = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
    page, found = between.subn(lambda marks: marks[1] + table + marks[2], page)
    if found != 1:
        raise ValueError(f"{PAGE} has {found} places for the table of {name}, not one")
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
