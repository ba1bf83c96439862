"""Keys: equal where the engine's prefix cache can be used, different where it cannot."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.reading.facts import BLOCK, MOST_BLOCKS, Facts
from proxy.reading.request import read_json
from proxy.routes import Prompt


def facts(prompt: Prompt = Prompt.CHAT, /, **members) -> Facts:
    return read_json(json.dumps(members).encode(), prompt).facts


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "you are"}


def test_the_next_turn_has_the_last_request_as_a_prefix():
    first = facts(model="m", messages=[SYSTEM, user("a")])
    second = facts(model="m", messages=[SYSTEM, user("a"), assistant("b"), user("c")])
    assert second.keys[:2] == first.keys
    assert second.turns == 4
    assert first.whole in second.keys[:-1]


def test_another_word_is_another_key_from_there_on():
    one = facts(messages=[SYSTEM, user("a"), assistant("b")])
    other = facts(messages=[SYSTEM, user("A"), assistant("b")])
    assert one.keys[0] == other.keys[0]
    assert not set(one.keys[1:]) & set(other.keys[1:])


def test_messages_cannot_run_into_each_other():
    assert facts(messages=["ab", "c"]).whole != facts(messages=["a", "bc"]).whole


@pytest.mark.parametrize(
    "member",
    [
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template": "{{ x }}"},
        {"cache_salt": "s"},
        {"documents": []},
    ],
)
def test_what_is_rendered_before_the_messages_is_in_every_key(member):
    plain, seeded = facts(messages=[user("a")]), facts(messages=[user("a")], **member)
    assert not set(plain.keys) & set(seeded.keys)


def test_sampling_and_streaming_are_in_no_key():
    plain = facts(messages=[user("a")])
    other = facts(messages=[user("a")], temperature=0.5, max_tokens=3, stream=True, model="alias", user="u")
    assert plain.keys == other.keys
    assert other.stream is True
    assert plain.stream is False


@pytest.mark.parametrize("prompt", [Prompt.CHAT, Prompt.MESSAGES])
def test_a_cache_mark_that_moves_to_the_newest_message_changes_no_key(prompt):
    def marked(text):
        return {"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}

    first = facts(prompt, messages=[marked("a")])
    second = facts(prompt, messages=[user("a"), assistant("b"), marked("c")])
    assert second.keys[0] == first.whole


def test_system_and_messages_are_one_prompt_on_the_messages_route():
    first = facts(Prompt.MESSAGES, system="you are", messages=[user("a")])
    second = facts(Prompt.MESSAGES, system="you are", messages=[user("a"), assistant("b"), user("c")])
    other = facts(Prompt.MESSAGES, system="you are not", messages=[user("a")])
    assert second.keys[:2] == first.keys
    assert not set(other.keys) & set(first.keys)
    assert first.opening == second.opening == first.keys[1]


def test_instructions_and_input_are_one_prompt_on_the_responses_route():
    first = facts(Prompt.RESPONSES, instructions="i", input="a")
    listed = facts(Prompt.RESPONSES, instructions="i", input=[user("a"), assistant("b"), user("c")])
    assert first.turns == 2
    assert listed.turns == 4
    assert listed.keys[0] == first.keys[0]


def test_a_completion_is_one_message():
    assert facts(Prompt.COMPLETION, prompt="once").turns == 1
    assert facts(Prompt.COMPLETION, prompt=["a", "b"]).turns == 1
    assert facts(Prompt.COMPLETION, prompt="once").keys != facts(Prompt.COMPLETION, prompt="twice").keys


TEXT = 'He said "yes"\n and then \u00fcber \U0001f600 \\ ' * 500


@given(st.integers(2 * BLOCK, 6 * BLOCK), st.integers(0, 6 * BLOCK))
def test_a_raw_prompt_that_grew_begins_with_the_keys_of_what_it_was(length, more):
    before = facts(Prompt.COMPLETION, prompt=TEXT[:length], stream=True)
    after = facts(Prompt.COMPLETION, prompt=TEXT[: length + more], stream=True)
    assert after.keys[: before.turns] == before.keys
    assert after.sizes[: before.turns] == before.sizes
    assert not after.messages


def test_a_prompt_of_tokens_that_grew_is_found_again_too():
    tokens = list(range(1000, 5000))
    before = facts(Prompt.COMPLETION, prompt=tokens)
    after = facts(Prompt.COMPLETION, prompt=[*tokens, *range(3000)])
    assert before.turns > 10
    assert after.keys[: before.turns] == before.keys
    assert after.turns > before.turns


def test_another_raw_prompt_has_other_keys_from_where_it_differs():
    text = "the same " * 1000
    one, other = facts(Prompt.COMPLETION, prompt=text), facts(Prompt.COMPLETION, prompt=text[:5000] + "!" + text[5000:])
    common = [a == b for a, b in zip(one.keys, other.keys, strict=False)]
    assert common == [True] * (5000 // BLOCK) + [False] * (len(common) - 5000 // BLOCK)
    salted = facts(Prompt.COMPLETION, prompt=text, cache_salt="mine")
    assert salted.keys[0] != one.keys[0]


def test_the_keys_of_a_raw_prompt_are_bounded_and_cover_all_of_it():
    long = facts(Prompt.COMPLETION, prompt="x" * (MOST_BLOCKS + 500) * BLOCK)
    assert long.turns == MOST_BLOCKS
    assert long.sizes[-1] == (MOST_BLOCKS + 500) * BLOCK


@pytest.mark.parametrize("empty", ["", [], None])
def test_an_empty_raw_prompt_has_no_keys_for_none_would_cover_a_byte(empty):
    assert facts(Prompt.COMPLETION, prompt=empty) == facts(Prompt.COMPLETION, prompt=empty, cache_salt="mine")
    assert facts(Prompt.COMPLETION, prompt=empty).keys == ()


def test_a_raw_prompt_has_no_opening_but_itself():
    prompt = facts(Prompt.COMPLETION, prompt="x" * 5 * BLOCK)
    assert prompt.opening == prompt.whole


def test_the_opening_is_the_instructions_and_the_first_message_after_them():
    first = facts(messages=[SYSTEM, SYSTEM, user("a")])
    later = facts(messages=[SYSTEM, SYSTEM, user("a"), assistant("b"), user("c")])
    other = facts(messages=[SYSTEM, SYSTEM, user("b")])
    assert first.opening == later.opening == first.keys[2]
    assert other.opening != first.opening
    assert facts(messages=[SYSTEM]).opening is not None
    assert facts(messages=[]).opening is None


@pytest.mark.parametrize("value", [None, "text", 3, {"a": 1}, [], [1, None, "x", {"content": 2}]])
@pytest.mark.parametrize("prompt", list(Prompt))
def test_odd_prompts_are_the_engine_s_to_refuse(prompt, value):
    members = {"messages": value, "input": value, "prompt": value, "system": value, "instructions": value}
    assert isinstance(facts(prompt, **members), Facts)


def test_lone_surrogates_are_hashed_as_they_are():
    assert facts(messages=["\ud800"]).whole != facts(messages=["\udfff"]).whole
