"""The configuration as JSON Schema (draft 2020-12), for editors: ``python -m supervisord.config.schema``.

It says everything that one value alone can have wrong. Rules between keys (the order of the idle ladder, unique names)
only the loader knows. A regular expression stands where the loader parses.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from supervisord.config.forms import NOT_EMPTY, PLAIN, VARIABLE
from supervisord.config.keys import ROOT
from supervisord.config.kinds import (
    CommandLine,
    Duration,
    EngineOption,
    Environment,
    Flag,
    Form,
    Kind,
    ListOf,
    Named,
    Size,
    Table,
    Text,
    Whole,
)
from supervisord.config.quantities import DURATION_PATTERN, MAX_SECONDS, SIZE_PATTERN

Schema = dict[str, Any]

_OPTION: Schema = {"$ref": "#/$defs/engine-option"}


def schema() -> Schema:
    """The whole schema as plain values."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vllm-supervisord configuration",
        **_of(ROOT),
        "$defs": {
            "engine-option": {
                "anyOf": [
                    _text(PLAIN),
                    {"type": ["number", "boolean"]},
                    {"type": "array", "items": _OPTION},
                    {"type": "object", "additionalProperties": _OPTION},
                ]
            }
        },
    }


def _text(form: Form) -> Schema:
    return {"type": "string", "pattern": f"^(?:{form.pattern})$"}


def _of(kind: Kind) -> Schema:
    match kind:
        case Table():
            return _table(kind)
        case Named():
            names = {"pattern": f"^(?:{kind.form.pattern})$"}
            return {"type": "object", "propertyNames": names, "additionalProperties": _of(kind.table)}
        case EngineOption():
            return dict(_OPTION)
        case Environment():
            names = {"pattern": f"^(?:{VARIABLE.pattern})$"}
            return {
                "type": "object",
                "propertyNames": names,
                "additionalProperties": {"anyOf": [_text(PLAIN), {"type": "number"}]},
            }
        case ListOf():
            return {"type": "array", "items": _of(kind.item)} | ({"uniqueItems": True} if kind.unique else {})
        case CommandLine():
            return {"anyOf": [_text(NOT_EMPTY), {"type": "array", "items": _text(PLAIN)}]}
        case Text():
            return {"enum": list(kind.choices)} if kind.choices else _text(kind.form)
        case Flag():
            return {"type": "boolean"}
        case Whole():
            return {"type": "integer", "minimum": kind.minimum, "maximum": kind.maximum}
        case Size():
            number = {"type": "integer", "minimum": kind.minimum, "maximum": kind.maximum}
            return {"anyOf": [number, _quantity(SIZE_PATTERN, positive=kind.minimum > 0)]}
        case Duration():
            least = {"minimum": 0} if kind.zero else {"exclusiveMinimum": 0}
            choices: list[Schema] = [
                {"type": "number", **least, "maximum": MAX_SECONDS},
                _quantity(DURATION_PATTERN, positive=not kind.zero),
            ]
            if kind.never:
                choices.append({"type": "string", "pattern": "^[ \\t]*infinity[ \\t]*$"})
            return {"anyOf": choices}


def _quantity(pattern: str, *, positive: bool) -> Schema:
    """A number with units; it is more than nothing when any of its digits is."""
    whole = {"type": "string", "pattern": f"^(?:{pattern})$"}
    return whole | ({"allOf": [{"pattern": "[1-9]"}]} if positive else {})


def _table(table: Table) -> Schema:
    properties: Schema = {}
    for key in table.keys:
        inner = _of(key.kind)
        properties[key.name] = inner if "$ref" in inner else {"description": key.doc, **inner}
    properties |= {name: False for name, _ in table.taken}
    result: Schema = {"type": "object", "properties": properties}
    result["additionalProperties"] = _of(table.others) if table.others else False
    if table.others_form:
        result["propertyNames"] = {"pattern": f"^(?:{table.others_form.pattern})$"}
    if required := [key.name for key in table.keys if key.required]:
        result["required"] = required
    return result


def text() -> str:
    """What packaging/config.schema.json holds."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
