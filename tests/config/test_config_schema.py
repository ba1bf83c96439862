"""The shipped schema and the loader are one: same file, same verdict on any document."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.config.check import read
from supervisord.config.keys import ROOT, TAKEN_OPTIONS
from supervisord.config.kinds import (
    CommandLine,
    Duration,
    EngineOption,
    Environment,
    Flag,
    Kind,
    ListOf,
    Named,
    Size,
    Table,
    Text,
    Whole,
)
from supervisord.config.merge import Merged
from supervisord.config.schema import schema, text

SHIPPED = Path(__file__).parents[2] / "packaging" / "config.schema.json"


def test_shipped_schema_is_the_generated_one() -> None:
    assert SHIPPED.read_text(encoding="utf-8") == text(), (
        "run: python -m supervisord.config.schema > packaging/config.schema.json"
    )


def test_schema_is_valid_itself() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def _ecma_pattern(_validator: object, pattern: str, instance: object, _schema: object) -> Any:
    """``$`` as ECMA-262 means it: the very end. Python's also matches before a last line feed."""
    if isinstance(instance, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern}")


_Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _ecma_pattern})
VALIDATOR = _Validator(json.loads(SHIPPED.read_text(encoding="utf-8")))

JUNK = st.one_of(
    st.none().map(lambda _: {}),
    st.booleans(),
    st.integers(-5, 10**13),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        [0, 1, 1.0, 1.5, "", "0", "a\n", "a\x00b", "infinity", "10min\n", " 5 min", "1h 30", "0s", "0.0B", "1e3"]
    ),
    st.text(max_size=6),
    st.lists(st.integers(-2, 3), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
NAMES = st.sampled_from(["chat", "org/chat", "a b", "-a", "", "ü", "a.b", "a\n", "x" * 40])
UNITS = st.sampled_from(["", "s", "min", "h", " ms", "M", "mins", "G", "K", "GB", "B", "y"])
QUANTITY = st.tuples(st.integers(0, 99), UNITS).map(lambda pair: f"{pair[0]}{pair[1]}")
OPTIONS = st.sampled_from(
    [
        "max-model-len",
        "max_model_len",
        "hf-overrides.x",
        "--x",
        "a b",
        "modle",
        "args2",
        "x-",
        *TAKEN_OPTIONS,
        "ssl_keyfile",
    ]
)


def _good(kind: Kind) -> st.SearchStrategy[Any]:
    match kind:
        case Table():
            return _tables(kind)
        case Named():
            return st.dictionaries(NAMES, st.one_of(_tables(kind.table), JUNK), max_size=2)
        case Text(choices=choices) if choices:
            return st.sampled_from(choices)
        case Text(form=form):
            return st.one_of(
                st.from_regex(form.pattern, fullmatch=True),
                st.sampled_from(["http://localhost:1", "unix:/a", "a.service"]),
            )
        case Flag():
            return st.booleans()
        case Whole():
            return st.integers(kind.minimum - 1, 2000)
        case Size() | Duration():
            return st.one_of(QUANTITY, st.lists(QUANTITY, min_size=2, max_size=3).map(" ".join), st.integers(0, 100))
        case ListOf():
            return st.lists(_good(kind.item), max_size=3)
        case CommandLine():
            return st.one_of(st.just("vllm serve"), st.lists(st.text(max_size=3), max_size=2))
        case Environment():
            return st.dictionaries(st.sampled_from(["A", "B-C", "1"]), JUNK, max_size=2)
        case EngineOption():
            return JUNK


@st.composite
def _tables(draw: st.DrawFn, table: Table) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in table.keys:
        if draw(st.integers(0, 9)) < (8 if key.required else 3):
            result[key.name] = draw(_good(key.kind) if draw(st.integers(0, 19)) else JUNK)
    if draw(st.integers(0, 19)) == 0:
        result[draw(st.sampled_from([key.name[:-1] for key in table.keys]))] = draw(JUNK)
    if table.others and draw(st.booleans()):
        result[draw(OPTIONS)] = draw(JUNK)
    return result


@settings(max_examples=300, deadline=None)
@given(_tables(ROOT))
def test_schema_and_loader_agree_on_any_document(document: Mapping[str, Any]) -> None:
    _, problems = read(Merged(document=dict(document)))
    errors = [error.message for error in VALIDATOR.iter_errors(document)]
    assert bool(problems) == bool(errors), (problems, errors)


@settings(max_examples=200, deadline=None)
@given(st.one_of([_good(kind) for kind in (Duration(), Duration(never=True), Size(), Size(minimum=1))]) | JUNK)
def test_schema_and_loader_agree_on_quantities(value: object) -> None:
    for document in (
        {"proxy": {"keepalive": value}},
        {"proxy": {"connect_timeout": value}},
        {"proxy": {"wait_comment_after": value}},
        {"proxy": {"max_body": value}},
    ):
        _, problems = read(Merged(document=document))
        assert bool(problems) != VALIDATOR.is_valid(document), (document, problems)
