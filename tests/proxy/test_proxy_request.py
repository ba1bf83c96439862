"""Reading a JSON body: exactly json.loads, and the model's place in the bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import ProxyError
from proxy.http.body import Body
from proxy.reading.members import read_members
from proxy.reading.request import _read_exactly, read_json
from proxy.routes import Prompt

SPACE = st.text(" \t\n\r", max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("model"), inner, max_size=3)
    ),
    max_leaves=8,
)
STRINGS = st.text(st.characters(codec=None), max_size=8)  # lone surrogates too


@st.composite
def spelled(draw, value):
    """A JSON text for ``value``, with any white space and any escapes."""
    if isinstance(value, str):
        return '"' + "".join(draw(_spelled_character(c)) for c in value) + '"'
    if isinstance(value, dict):
        parts = [
            f"{draw(SPACE)}{draw(spelled(k))}{draw(SPACE)}:{draw(SPACE)}{draw(spelled(v))}{draw(SPACE)}"
            for k, v in value.items()
        ]
        return "{" + (",".join(parts) or draw(SPACE)) + "}"
    if isinstance(value, list):
        parts = [f"{draw(SPACE)}{draw(spelled(v))}{draw(SPACE)}" for v in value]
        return "[" + (",".join(parts) or draw(SPACE)) + "]"
    return json.dumps(value)


def _spelled_character(character):
    escaped = json.dumps(character)[1:-1]
    # Unescaped, a surrogate is no UTF-8, and a pair of them would join.
    safe = character >= " " and character not in '"\\' and not "\ud800" <= character <= "\udfff"
    return st.sampled_from([escaped, character] if safe else [escaped])


@st.composite
def bodies(draw):
    """An object with any number of ``model`` members at any place, and models within other members."""
    names = st.sampled_from(["model", "messages", "input", "tools", "stream", "x", "mod"]) | st.text(max_size=4)
    members = draw(st.lists(st.tuples(names, JSON), max_size=5))
    if draw(st.booleans()):
        members.insert(draw(st.integers(0, len(members))), ("model", draw(STRINGS)))
    parts = [f"{draw(SPACE)}{draw(spelled(name))}{draw(SPACE)}:{draw(SPACE)}{draw(spelled(v))}" for name, v in members]
    text = draw(SPACE) + "{" + draw(SPACE) + ",".join(part + draw(SPACE) for part in parts) + "}" + draw(SPACE)
    return text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le"])))


@given(bodies(), st.text(max_size=12))
def test_splicing_changes_the_model_and_nothing_else(data, name):
    meant = json.loads(data)
    if not isinstance(meant.get("model"), str | None):
        with pytest.raises(ProxyError):
            read_json(data, Prompt.CHAT)
        return
    read = read_json(data, Prompt.CHAT)
    assert read.facts.model == (meant.get("model") or None)
    assert read.facts.stream is (meant.get("stream") is True)
    assert (read.model_name is None) == ("model" not in meant)
    if read.model_name is None:
        return
    splice = read.model_name.replaced_by(name)
    body = Body(limit=len(data))
    body.append(data)
    changed = b"".join(bytes(piece) for piece in body.pieces(splice))
    assert len(changed) == body.spliced_size(splice)
    assert json.loads(changed) == {**meant, "model": name}
    assert changed.startswith(data[: splice.start])
    assert changed.endswith(data[splice.end :])


@given(st.binary(max_size=30) | st.text('{}[]":,\\ue0m \t1tfn', max_size=20).map(str.encode) | bodies())
def test_accepts_exactly_what_json_loads_accepts(data):
    try:
        expected = json.loads(data)
    except (ValueError, RecursionError):
        expected = None
    if isinstance(expected, dict) and isinstance(expected.get("model"), str | None):
        assert read_json(data, Prompt.CHAT).facts.model == (expected.get("model") or None)
    else:
        with pytest.raises(ProxyError) as refused:
            read_json(data, Prompt.CHAT)
        assert refused.value.status == 400


@given(bodies(), st.data())
def test_a_damaged_body_is_judged_as_json_loads_judges_it(data, draw):
    at = draw.draw(st.integers(0, max(0, len(data) - 1)))
    test_accepts_exactly_what_json_loads_accepts.hypothesis.inner_test(data[:at] + data[at + 1 :])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot parse the request body as JSON"),
        (b"{", "cannot parse the request body as JSON"),
        (b'{"model": "m"} x', "cannot parse the request body as JSON"),
        (b'{"model": "m",}', "cannot parse the request body as JSON"),
        (b'\xff\xfe{"a"', "cannot parse the request body as JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[1]", "must be a JSON object"),
        (b'"model"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"model": 7}', "model must be a string"),
        (b'{"model": ["m"]}', "model must be a string"),
        (b'{"n": ' + b"9" * 5000 + b"}", "4300"),
    ],
)
def test_what_is_no_object_with_a_model_is_refused_in_words(data, words):
    with pytest.raises(ProxyError) as refused:
        read_json(data, Prompt.CHAT)
    assert refused.value.status == 400
    assert refused.value.code == 400  # as vLLM: the number
    assert words in refused.value.message


@pytest.mark.parametrize("data", [b"{}", b'{"model": null}', b'{"model": ""}', b'{"x": {"model": "inner"}}'])
def test_no_model_is_none(data):
    assert read_json(data, Prompt.CHAT).facts.model is None


@given(bodies(), st.sampled_from(Prompt))
def test_the_quick_way_of_reading_tells_what_the_long_one_does(data, prompt):
    quick = read_members(data, prompt)
    if quick is not None:
        exact = _read_exactly(data, prompt)
        assert quick[0] == exact.facts
        assert bool(quick[1]) == (exact.model_name is not None)


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße \u2603"}
TAKES_IT = [
    (Prompt.CHAT, {"messages": [SYSTEM, {"role": "developer"}, USER], "tools": [{"a": 1}], "stream": True}),
    (Prompt.CHAT, {"messages": [SYSTEM], "cache_salt": "x", "chat_template_kwargs": None, "stream": 1}),
    (Prompt.CHAT, {"messages": [1, "x", None, [SYSTEM]], "documents": []}),
    (Prompt.CHAT, {}),
    (Prompt.COMPLETION, {"prompt": ["a", "b"], "functions": 1}),
    (Prompt.COMPLETION, {"prompt": None}),
    (Prompt.RESPONSES, {"instructions": "Be brief.", "input": [USER, SYSTEM]}),
    (Prompt.RESPONSES, {"instructions": None, "input": "Hello", "mm_processor_kwargs": {}}),
    (Prompt.RESPONSES, {"input": [SYSTEM, USER], "chat_template": "{{x}}"}),
    (Prompt.RESPONSES, {"input": "a", "previous_response_id": "resp_1", "background": True}),
    (Prompt.RESPONSES, {"input": "a", "previous_response_id": 7, "background": 1}),
    (Prompt.CHAT, {"messages": [USER], "previous_response_id": "resp_1", "background": True}),
    (Prompt.MESSAGES, {"system": "Be brief.", "messages": [USER, {**USER, "cache_control": {"type": "ephemeral"}}]}),
    (Prompt.MESSAGES, {"system": None, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    (Prompt.MESSAGES, {"messages": [SYSTEM, {"content": [{"b": 1.50, "a": 12345678901234567890}]}]}),
    (Prompt.CHAT, {"messages": [SYSTEM, {**USER, "cache_control": {}}], "x": '"cache_control"'}),
    (Prompt.CHAT, {"messages": [SYSTEM, USER], "cache_control": {}}),
    (Prompt.RESPONSES, {"input": [{**USER, "cache_control": {}}, SYSTEM]}),
    (Prompt.NONE, {"input": ["a"], "messages": [1]}),
]


@pytest.mark.parametrize(("prompt", "members"), TAKES_IT)
def test_what_clients_send_is_read_the_quick_way(prompt, members):
    for ascii_only in (True, False):
        data = json.dumps({"model": "m", **members}, ensure_ascii=ascii_only, indent=1).encode()
        quick = read_members(data, prompt)
        assert quick is not None
        assert quick[0] == _read_exactly(data, prompt).facts
        assert quick[1] == b'"m"'


@pytest.mark.parametrize("at", [0, 1, 4000, 4068, 4090, 4096, 8000])
@pytest.mark.parametrize("digits", [4301, 4400, 9000])
def test_a_number_that_python_does_not_read_is_refused_wherever_it_is(at, digits):
    data = b'{"model": "m", "x": "' + b"x" * at + b'", "n": ' + b"7" * digits + b"}"
    with pytest.raises(ProxyError, match="4300"):
        read_json(data, Prompt.CHAT)
