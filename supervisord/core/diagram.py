"""Draws the life cycle from the table: ``python -m supervisord.core.diagram > docs/lifecycle.md``."""

from __future__ import annotations

from supervisord.core.states import TRANSITIONS, Cause, Health, Hold, Life

_MEANING = {
    Life.STOPPED: "the unit is down",
    Life.STARTING: "the unit is starting, or it runs and the engine is still loading",
    Life.READY: "awake, weights whole: gets requests",
    Life.DRAINING: "the gate is closed, requests in flight finish",
    Life.FALLING_ASLEEP: "the sleep sequence runs",
    Life.ASLEEP: "level 1 (weights in host RAM) or level 2 (weights dropped)",
    Life.WAKING: "the wake sequence runs, or weights that may not be whole are loaded again",
    Life.STOPPING: "the unit is being stopped",
    Life.FAILED: "left alone until the back-off is over",
}
_HEALTH = {
    Health.OK: "answers",
    Health.TRIAL: "a request failed there, looks are well: gets one at a time until one succeeds",
    Health.SUSPECT: "a connection or a look failed: gets requests only when nobody else is left",
    Health.DEAD: "confirmed: its unit is restarted",
}
_HOLD = {
    Hold.NONE: "requests start and wake it",
    Hold.DRAINED: "runs, gets no requests, until `vllmctl up` or `wake`",
    Hold.DOWN: "stopped, and no request starts it, until `vllmctl up`",
}


def document() -> str:
    """The page, as Markdown with a Mermaid diagram."""
    arrows: dict[tuple[Life, Life], list[Cause]] = {}
    for row in TRANSITIONS:
        arrows.setdefault((row.source, row.target), []).append(row.cause)
    lines = [
        "# A replica's life",
        "",
        "Made from the table in `supervisord/core/states.py` by",
        "`python -m supervisord.core.diagram > docs/lifecycle.md`; a test holds the two together.",
        "The words are those that `vllmctl status` and D-Bus show.",
        "",
        "| state | meaning |",
        "|---|---|",
        *(f"| `{life}` | {_MEANING[life]} |" for life in Life),
        "",
        "Health and hold are separate from the life state:",
        "",
        "| health | meaning |",
        "|---|---|",
        *(f"| `{health}` | {_HEALTH[health]} |" for health in Health),
        "",
        "| hold | meaning |",
        "|---|---|",
        *(f"| `{hold}` | {_HOLD[hold]} |" for hold in Hold),
        "",
        "```mermaid",
        "stateDiagram-v2",
        f"    [*] --> {Life.STOPPED}",
        *(f"    {a} --> {b}: {' / '.join(causes)}" for (a, b), causes in arrows.items()),
        "```",
        "",
        "| from | because | to |",
        "|---|---|---|",
        *(f"| `{row.source}` | {row.cause} | `{row.target}` |" for row in TRANSITIONS),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
