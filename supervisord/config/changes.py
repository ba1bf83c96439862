"""What a reload changes, in sentences for the person who asked for it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from supervisord.core.spec import Config, ModelSpec

#: Keys that only a new start of the daemon can follow.
_AT_START = frozenset({"listen"})


def changes(before: Config, after: Config) -> list[str]:
    """One sentence each; empty when nothing changed."""
    old = {model.name: model for model in before.models}
    new = {model.name: model for model in after.models}
    said = [f"model {name} is new" for name in new if name not in old]
    said += [f"model {name} is gone" for name in old if name not in new]
    for name, model in new.items():
        if name in old:
            said += _model_changes(old[name], model)
    for table in ("proxy", "supervisor"):
        for key in _different(getattr(before, table), getattr(after, table)):
            late = "; it takes effect at the next start of the supervisor" if key in _AT_START else ""
            said.append(f"[{table}] {key} changed{late}")
    return said


def _model_changes(before: ModelSpec, after: ModelSpec) -> list[str]:
    said = [f"model {after.name}: {key} changed" for key in _different(before, after) if key != "replicas"]
    old = {replica.name: replica for replica in before.replicas}
    new = {replica.name: replica for replica in after.replicas}
    said += [f"model {after.name}: replica {name} is new" for name in new if name not in old]
    said += [f"model {after.name}: replica {name} is gone" for name in old if name not in new]
    for name in new:
        if name in old:
            keys = ", ".join(_different(old[name], new[name]))
            if keys:
                said.append(f"replica {name}: {keys} changed")
    return said


def _different(before: Any, after: Any) -> list[str]:
    return [field.name for field in fields(before) if getattr(before, field.name) != getattr(after, field.name)]
