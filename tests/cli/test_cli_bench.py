"""vllmctl bench routing without a machine: the texts, the loads, and what is made of the figures."""

import asyncio
from collections import Counter as Tally

import pytest

from supervisord.cli.bench.caller import Answered
from supervisord.cli.bench.loads import Load, Measured, percentile, run_burst, run_conversations
from supervisord.cli.bench.routing import ask_first
from supervisord.cli.bench.texts import Writer
from supervisord.cli.bench.verdict import judge
from supervisord.cli.exits import Failure

LOAD = Load(context=1000, burst=4, conversations=3, turns=3, output=8)


class Scripted:
    """Answers as a test says, and remembers what it was asked."""

    def __init__(self, *answers: Answered) -> None:
        self.asked: list[tuple[str, list]] = []
        self.most = self.at_once = 0
        self._answers = list(answers)

    async def chat(self, messages, output, routing=""):
        self.asked.append((routing, [dict(message) for message in messages]))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return self._answers.pop(0) if self._answers else Answered(0.25, 1.0, "yes", 1000, 900)


def measured(policy: str, bursts: list[float], warm: list[float], errors: tuple[str, ...] = ()) -> Measured:
    return Measured(policy, bursts=bursts, warm_first=warm, errors=list(errors))


def test_a_text_has_the_wanted_length_and_shares_no_beginning_with_another():
    writer = Writer(tokens_per_word=2.0)
    one, other = writer.text("one", 1000), writer.text("other", 1000)
    assert len(one.split()) == 500 + 1  # its name stands before it
    assert one.split()[0] != other.split()[0]
    assert one == writer.text("one", 1000)


async def test_a_burst_is_asked_all_at_once_about_one_text():
    caller, result = Scripted(), Measured("affinity")
    await run_burst(caller, Writer(), LOAD, "name", result)
    assert caller.most == LOAD.burst
    assert {routing for routing, _ in caller.asked} == {"affinity"}
    texts = [messages[0]["content"].partition("\nQuestion")[0] for _, messages in caller.asked]
    assert len(set(texts)) == 1
    assert len({messages[0]["content"] for _, messages in caller.asked}) == LOAD.burst
    assert (len(result.bursts), len(result.burst_first)) == (1, LOAD.burst)


async def test_a_conversation_sends_all_of_itself_again_and_only_its_later_turns_count_as_warm():
    caller, result = Scripted(), Measured("prefill")
    await run_conversations(caller, Writer(), LOAD, "name", result)
    assert Tally(len(messages) for _, messages in caller.asked) == {1: 3, 3: 3, 5: 3}
    assert caller.most == LOAD.conversations
    longest = max((messages for _, messages in caller.asked), key=len)
    assert any(messages == longest[:3] for _, messages in caller.asked)
    assert (len(result.cold_first), len(result.warm_first)) == (3, 6)
    assert result.cached_share == 0.9


async def test_an_engine_that_does_not_tell_what_it_cached_is_not_taken_for_one_that_caches_nothing():
    result = Measured("prefill")
    await run_conversations(Scripted(*[Answered(0.1, 0.2, "x", 10, None)] * 9), Writer(), LOAD, "name", result)
    assert result.cached_share is None


async def test_a_failed_request_is_an_error_and_no_figure():
    caller, result = Scripted(*[Answered(0.0, 0.0, error="503: no")] * 4), Measured("prefill")
    await run_burst(caller, Writer(), LOAD, "name", result)
    assert (result.errors, result.burst_first) == (["503: no"] * 4, [])


def test_the_policy_that_is_best_over_both_loads_is_chosen():
    verdict = judge(
        [
            measured("affinity", [30.1], [1.1]),
            measured("roundrobin", [18.6], [2.7]),
            measured("prefill", [19.0], [1.1]),
        ],
        "affinity",
    )
    assert verdict.policy == "prefill"
    assert verdict.scores["prefill"] == pytest.approx((19.0 / 18.6) ** 0.5)
    assert "affinity, which is configured, costs 26% more" in verdict.why


def test_what_is_configured_stays_where_nothing_is_clearly_better():
    verdict = judge([measured("adaptive", [10.4], [1.0]), measured("prefill", [10.0], [1.0])], "adaptive")
    assert verdict.policy == "adaptive"
    assert "level with prefill" in verdict.why


def test_a_policy_under_which_a_request_failed_is_not_chosen():
    verdict = judge([measured("adaptive", [1.0], [0.1], ("503",)), measured("prefill", [10.0], [1.0])], "adaptive")
    assert verdict.policy == "prefill"
    assert judge([measured("prefill", [1.0], [1.0], ("503",))], "prefill").policy == ""


@pytest.mark.parametrize(
    ("values", "share", "wanted"), [([], 0.5, None), ([3.0], 0.95, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0)]
)
def test_percentiles_are_of_the_nearest_rank(values, share, wanted):
    assert percentile(values, share) == wanted


@pytest.mark.parametrize(
    ("error", "what_to_do"),
    [
        ("400: this port speaks TLS: use https://", "--url https://NAME:PORT"),
        ("ClientConnectorCertificateError: certificate verify failed", "SSL_CERT_FILE"),
        ("401: no API key", "OPENAI_API_KEY=KEY"),
        ("503: no live replica", ""),
    ],
)
async def test_a_port_that_guards_itself_is_told_with_what_opens_it(error, what_to_do):
    with pytest.raises(Failure, match="cannot ask the model: ") as failure:
        await ask_first(Scripted(Answered(0.0, 0.0, error=error)))
    said, _, remedy = str(failure.value).partition("\n")
    assert said == f"cannot ask the model: {error}."
    assert what_to_do in remedy
    assert bool(what_to_do) is bool(remedy)
