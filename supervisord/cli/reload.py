"""``vllmctl reload``."""

from __future__ import annotations

from supervisord.cli.exits import Exit
from supervisord.cli.session import Session


def run_reload(session: Session) -> Exit:
    """Have the supervisor read its configuration again, and say what changed."""
    return session.run(lambda: _reload(session))


async def _reload(session: Session) -> Exit:
    async with session.client() as client:
        changes = await client.reload(timeout=session.timeout)
    console = session.console
    if console.json:
        console.data({"changes": list(changes)})
    elif not console.quiet:
        for change in changes:
            console.say(change)
        if not changes:
            console.say("Nothing changed.")
    return Exit.DONE
