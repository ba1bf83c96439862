"""What ``vllmctl status --json`` prints, without a bus in between."""

from __future__ import annotations

from supervisord.bus.objects import ManagerFacts, tree_of
from supervisord.bus.snapshot import Mirror
from supervisord.cli.shapes import fleet_shape
from supervisord.core.view import FleetView


def status_of(view: FleetView, facts: ManagerFacts) -> dict[str, object]:
    """The fleet in the shape that vllmctl(1) describes."""
    tree = tree_of(view, facts)
    return fleet_shape(Mirror({path: {each.interface: dict(each.values)} for path, each in tree.items()}).fleet())
