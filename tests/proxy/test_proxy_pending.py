"""The prefill work that a replica still has to do, and what is learned of the time that it took."""

import pytest

from proxy.policies.pending import Charge, Pending


def test_a_request_is_done_once_and_the_next_becomes_the_first():
    pending = Pending()
    first, second = Charge(5.0, True), Charge(3.0, True)
    pending.add(first, 0.0)
    pending.add(second, 1.0)
    assert pending.seconds(2.0) == 6.0
    pending.done(first, 4.0)
    pending.done(first, 4.5)
    pending.release(first, 4.5)
    assert pending.seconds(5.0) == 2.0
    pending.done(second, 6.5)
    assert (first.own, second.own) == (4.0, 2.5)
    assert (len(pending), pending.seconds(7.0)) == (0, 0.0)


def test_what_is_done_in_one_step_shares_its_time_by_what_was_predicted():
    pending = Pending()
    before, first, *others = charges = [Charge(seconds, True) for seconds in (1.0, 6.0, 1.0, 1.0, 3.0)]
    for charge in charges:
        pending.add(charge, 0.0)
    pending.done(others[0], 1.0)  # in the step of the one that is the first now
    pending.done(before, 1.0)
    pending.done(first, 9.0)
    pending.done(others[1], 9.0)
    pending.done(others[2], 10.0)
    assert [charge.own for charge in charges] == [0.5, pytest.approx(8 * 6 / 7), None, None, 1.0]


def test_one_that_is_gone_was_not_computed_beside_another():
    pending = Pending()
    charges = [Charge(1.0, True) for _ in range(4)]
    for charge in charges:
        pending.add(charge, 0.0)
    pending.release(charges[3], 1.0)
    pending.done(charges[0], 2.0)
    pending.release(charges[1], 2.0)
    pending.done(charges[2], 3.0)
    assert [charge.own for charge in charges] == [2.0, None, 1.0, None]


def test_a_stream_that_is_late_holds_up_those_behind_it_and_a_whole_answer_does_not():
    for streams, left in ((True, 3.0), (False, 2.0)):
        pending = Pending()
        pending.add(Charge(5.0, streams), 0.0)
        pending.add(Charge(3.0, True), 0.0)
        assert pending.seconds(6.0) == left


@pytest.mark.parametrize("ends", ["as predicted", "gone"])
def test_a_first_byte_just_after_one_of_which_none_came_tells_no_time(ends):
    pending = Pending()
    first, other, last = charges = [Charge(2.0, True), Charge(1.0, ends == "gone"), Charge(4.0, True)]
    for charge in charges:
        pending.add(charge, 0.0)
    pending.done(first, 2.0)
    pending.seconds(3.0)
    pending.release(other, 3.0)
    pending.done(last, 3.002)
    assert (first.own, last.own) == (2.0, None)
