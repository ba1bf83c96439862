"""The life of one replica, each test one promise."""

from dataclasses import replace

import pytest
from world import (
    Call,
    CallEngine,
    IdleLadder,
    Life,
    Phase,
    Record,
    ShutDown,
    Verb,
    WakeLimits,
    World,
    asleep_world,
    model,
    ready_world,
)

from supervisord.core import step
from supervisord.core.actions import CommandFailure, NoteKind, Persist, RunUnitJob, UnitVerb
from supervisord.core.admission import Ending, Lease, RefusalCode, Refuse
from supervisord.core.admit import LeaseError
from supervisord.core.events import UnitChanged, UnitJobDone
from supervisord.core.record import Phase as RecordPhase
from supervisord.core.states import Health, Hold


def test_a_running_engine_is_adopted_and_not_restarted():
    world = ready_world()
    assert world.engines["a"].run == 1
    assert not world.pending_of(RunUnitJob)


def test_a_thousand_requests_to_a_stopped_model_cause_one_start_and_get_a_thousand_leases():
    world = World(model(wake=WakeLimits(max_waiting=1000)))
    tickets = [world.admit() for _ in range(1000)]
    assert len(world.pending_of(RunUnitJob)) == 1
    world.run()
    assert world.engines["a"].run == 1
    assert all(isinstance(world.outcomes[ticket], Lease) for ticket in tickets)
    assert world.replica().in_flight == 1000


def test_a_thousand_requests_to_a_sleeping_model_cause_one_wake():
    world = asleep_world()
    tickets = [world.admit() for _ in range(1000)]
    world.run()
    assert world.engines["a"].calls.count("wake_up") == 1
    assert all(isinstance(world.outcomes[ticket], Lease) for ticket in tickets)


def test_level_1_wakes_with_wake_up_alone():
    world = asleep_world(1)
    world.admit()
    world.run()
    assert world.engines["a"].calls == ["sleep 1", "wake_up"]


def test_level_2_wakes_with_weights_reload_kv_cache_and_prefix_reset_in_this_order():
    world = asleep_world(2)
    world.admit()
    world.run()
    calls = ["sleep 2", "wake_up weights", "reload_weights", "wake_up kv_cache", "reset_prefix_cache"]
    assert world.engines["a"].calls == calls


def test_level_1_goes_to_level_2_by_waking_first():
    world = asleep_world(1)
    world.command("a", Verb.SLEEP, 2)
    world.run()
    assert world.engines["a"].calls == ["sleep 1", "wake_up", "sleep 2"]
    assert world.replica().level == 2


def test_the_idle_ladder_goes_down_rung_by_rung_and_the_deepening_wake_is_no_use():
    world = ready_world()
    world.later(601)
    world.run()
    assert (world.life(), world.replica().level) == (Life.ASLEEP, 1)
    world.later(3000)
    world.run()
    assert (world.life(), world.replica().level) == (Life.ASLEEP, 2)
    world.later(28800 - 3600)
    world.run()
    assert world.life() is Life.STOPPED


def test_the_idle_clock_runs_from_the_last_completion_and_a_stream_outlives_every_tier():
    world = ready_world()
    lease = world.admit()
    world.later(100_000)
    world.run()
    assert world.life() is Life.READY
    world.finish(lease)
    world.later(599)
    world.run()
    assert world.life() is Life.READY
    world.later(2)
    world.run()
    assert world.life() is Life.ASLEEP


def test_looks_and_listings_are_no_activity():
    world = ready_world()
    before = world.replica().idle_since
    world.later(500)
    assert world.replica().idle_since == before


def test_sleep_is_sent_only_after_the_gate_is_closed_and_in_flight_is_zero():
    world = ready_world()
    lease = world.admit()
    world.command("a", Verb.SLEEP, 1)
    world.run()
    assert world.life() is Life.DRAINING
    assert world.engines["a"].calls == []
    world.finish(lease)
    world.run()
    assert world.life() is Life.ASLEEP


def test_the_intent_is_on_disk_before_the_first_call_of_a_wake():
    world = asleep_world(2)
    world.admit()
    (persist,) = world.pending_of(Persist)
    assert persist.record.phase is RecordPhase.WAKING
    assert not world.pending_of(CallEngine)
    world.complete(persist)
    assert [c.call for c in world.pending_of(CallEngine)] == [Call.WAKE_UP]


def test_a_wake_that_was_begun_finishes_though_every_waiter_left():
    world = asleep_world()
    ticket = world.admit()
    assert step.abandon(world.fleet, ticket)
    world.run()
    assert world.life() is Life.READY
    assert world.replica().in_flight == 0
    assert world.now - world.replica().idle_since < 1  # the idle clock starts at ready


def test_a_request_that_meets_the_idle_stop_waits_for_it_and_starts_the_model_again():
    world = ready_world(idle=IdleLadder(stop=10))
    world.later(11)
    assert world.life() is Life.STOPPING
    ticket = world.admit()
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)
    assert world.engines["a"].run == 2


def test_a_request_reopens_a_gate_that_is_draining():
    world = ready_world()
    lease = world.admit()
    command = world.command("a", Verb.SLEEP, 1)
    assert world.life() is Life.DRAINING
    second = world.admit()
    assert isinstance(world.outcomes[second], Lease)
    assert world.answers[command].failure is CommandFailure.SUPERSEDED
    world.finish(lease)
    assert world.life() is Life.READY


def test_an_unfinished_level_2_wake_of_the_daemon_before_is_finished_before_any_request():
    record = Record(2, Phase.WAKING, f"{1:032x}", Hold.NONE, 0.0)
    world = World(model(), records={"a": record}, running=("a",))
    world.engines["a"].whole = False  # awake, and garbage
    ticket = world.admit()
    while world.pending:
        assert world.engines["a"].whole or ticket not in world.outcomes
        world.complete(world.pending[0])
    world.run()
    assert world.engines["a"].whole
    assert isinstance(world.outcomes[ticket], Lease)
    assert world.disk == {}


def test_a_record_of_another_run_of_the_unit_is_void():
    record = Record(2, Phase.WAKING, f"{99:032x}", Hold.NONE, 0.0)
    world = World(model(), records={"a": record}, running=("a",))
    world.run()
    assert world.life() is Life.READY
    assert world.engines["a"].calls == []


def test_a_manual_wake_behind_our_back_after_level_2_is_repaired_before_traffic():
    world = asleep_world(2)
    world.engines["a"].level = 0  # plain wake_up by hand: healthy, and garbage
    world.later(6)
    assert world.life() is Life.WAKING
    ticket = world.admit()
    world.run()
    assert world.engines["a"].whole
    assert isinstance(world.outcomes[ticket], Lease)


def test_a_manual_sleep_is_seen_and_woken_as_from_level_2():
    world = ready_world()
    world.engines["a"].level, world.engines["a"].whole = 2, False
    world.later(6)
    assert world.life() is Life.ASLEEP
    world.admit()
    world.run()
    assert world.engines["a"].whole


def test_a_failed_wake_restarts_the_unit_once_by_itself_and_serves_the_waiters():
    world = asleep_world(1)
    ticket = world.admit()
    world.complete(world.pending_of(Persist)[0])
    world.complete(world.pending_of(CallEngine)[0], error="500: CUDA error in cumem allocator")
    (job,) = world.pending_of(RunUnitJob)
    assert job.verb is UnitVerb.RESTART
    world.run()
    assert world.noted(NoteKind.ESCALATED) == 1
    assert isinstance(world.outcomes[ticket], Lease)


def test_a_failed_start_tells_every_waiter_at_once_with_the_last_lines_and_backs_off():
    world = World(model())
    world.engines["a"].starts_fail = True
    tickets = [world.admit() for _ in range(3)]
    world.run()
    for ticket in tickets:
        refusal = world.outcomes[ticket]
        assert refusal.code is RefusalCode.WAKE_FAILED
        assert "it broke" in refusal.message
        assert refusal.retry_after >= 1
    again = world.admit()
    assert isinstance(again, Refuse)
    assert again.code is RefusalCode.WAKE_FAILED
    world.engines["a"].starts_fail = False
    world.later(3)
    later = world.admit()
    world.run()
    assert isinstance(world.outcomes[later], Lease)


def test_back_off_doubles_and_is_bounded():
    world = World(model())
    world.engines["a"].starts_fail = True
    delays = []
    for _ in range(10):
        world.admit()
        world.run()
        delays.append(world.replica().retry_at - world.now)
        world.later(delays[-1] + 0.1)
    assert delays[:4] == pytest.approx([2, 4, 8, 16], abs=1)
    assert max(delays) <= 300


def test_a_sleep_that_lies_is_noticed_and_that_replica_is_stopped_instead():
    world = ready_world()
    world.engines["a"].sleep_lies = True
    world.later(601)
    world.run()
    assert world.noted(NoteKind.SLEEP_FAILED) == 1
    assert world.life() is Life.STOPPED


def test_a_level_2_sleep_that_lies_has_its_weights_loaded_again():
    world = ready_world()
    world.engines["a"].sleep_lies = True
    ticket = world.command("a", Verb.SLEEP, 2)
    world.run()
    assert world.answers[ticket].failure is CommandFailure.SLEEP_FAILED
    assert "reload_weights" in world.engines["a"].calls


def test_a_connection_that_fails_demotes_at_once_and_excludes_for_this_request():
    world = World(model(replicas=("a", "b")), running=("a", "b"))
    world.run()
    lease = world.admit()
    assert lease.replica == "a"
    world.finish(lease, Ending.CONNECT_FAILED, "refused")
    assert world.replica("a").health is Health.SUSPECT
    second = world.admit(exclude={"a"})
    assert second.replica == "b"
    assert all(world.admit().replica == "b" for _ in range(5))


def test_a_suspect_that_is_the_last_one_still_gets_requests():
    world = ready_world()
    world.finish(world.admit(), Ending.CONNECT_FAILED, "refused")
    assert isinstance(world.admit(), Lease)


def test_a_failed_request_of_the_only_replica_waits_for_its_restart():
    world = ready_world()
    lease = world.admit()
    world.engines["a"].stop("failed")
    world.finish(lease, Ending.CONNECT_FAILED, "refused")
    ticket = world.admit(exclude={"a"})
    world.engines["a"].start()
    world.drift("a")
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)


def test_a_dead_engine_under_an_active_unit_is_restarted():
    world = ready_world()
    world.engines["a"].answering = False
    world.later(20)
    (job,) = world.pending_of(RunUnitJob)
    assert job.verb is UnitVerb.RESTART
    world.run()
    assert world.life() is Life.READY


def test_an_awake_replica_answers_whoever_was_accepted_before_the_shutdown_and_nobody_is_woken_for_them():
    world = World(model(replicas=("a", "b")), running=("a",))
    world.run()
    world.do(ShutDown())
    leases = [world.admit() for _ in range(10)]
    assert {lease.replica for lease in leases} == {"a"}
    assert not world.pending_of(RunUnitJob)


def test_waiting_is_bounded_in_number_and_time():
    world = World(model(wake=WakeLimits(timeout=30, max_waiting=2)))
    first, second = world.admit(), world.admit()
    third = world.admit()
    assert third.code is RefusalCode.QUEUE_FULL
    assert third.retry_after >= 1
    world.later(31)
    assert world.outcomes[first].code is RefusalCode.MODEL_STARTING
    assert world.outcomes[second].code is RefusalCode.MODEL_STARTING


def test_retry_after_comes_from_the_measured_wake_time():
    world = asleep_world(1, wake=WakeLimits(max_waiting=0))
    world.replica().wake_seconds[1] = 17.0
    refusal = world.admit()
    assert refusal.code is RefusalCode.QUEUE_FULL
    assert refusal.retry_after == 17.0


def test_an_unknown_model_is_refused_and_an_alias_works():
    world = ready_world(aliases=("gpt-4",))
    assert world.admit("nobody").code is RefusalCode.MODEL_NOT_FOUND
    assert world.admit("gpt-4").model == "chat"


def test_a_lease_is_returned_once():
    world = ready_world()
    lease = world.admit()
    world.finish(lease)
    world.open[lease.id] = lease
    with pytest.raises(LeaseError):
        world.finish(lease)


def test_without_the_intent_on_disk_nothing_is_done():
    world = ready_world()
    world.command("a", Verb.SLEEP, 2)
    world.complete(world.pending[0])  # the look before
    world.complete(world.pending_of(Persist)[0], error="No space left on device")
    assert world.engines["a"].calls == []
    assert world.life() is Life.READY


def test_a_wake_whose_intent_cannot_be_written_restarts_the_unit_instead():
    world = asleep_world(2)
    ticket = world.admit()
    world.complete(world.pending_of(Persist)[0], error="No space left on device")
    assert world.pending_of(RunUnitJob)[0].verb is UnitVerb.RESTART
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)


@pytest.mark.parametrize("how", ["started by us", "started again by systemd"])
def test_a_unit_that_systemd_starts_over_and_over_keeps_nobody_waiting(how):
    world = World(model(), running=("a",))
    world.run()
    engine = world.engines["a"]
    if how == "started by us":
        world.command("a", Verb.STOP)
        world.command("a", Verb.START)
        world.run()
        world.command("a", Verb.RESTART)
        world.complete(world.pending_of(RunUnitJob)[0])  # Type=exec: done when the process is there
    else:
        world.do(UnitChanged("a", replace(engine.status(), active_state="activating", sub_state="auto-restart")))
        engine.start()
        world.drift("a")
    ticket = world.admit()
    engine.active = "activating"
    ended = replace(engine.status(), sub_state="auto-restart", result="exit-code", exec_main_status=1)
    engine.answering = False
    world.do(UnitChanged("a", ended))
    assert world.life() is Life.FAILED
    world.run()  # its last lines
    refused = world.outcomes[ticket]
    assert (refused.code, refused.retry_after) == (RefusalCode.WAKE_FAILED, 2.0)
    assert "it broke" in refused.message
    assert engine.active == "inactive"  # the back-off is ours


def test_a_run_that_ends_before_its_start_is_told_keeps_nobody_waiting():
    world = World(model())
    ticket = world.admit()
    (job,) = world.pending_of(RunUnitJob)
    world.pending.remove(job)
    engine = world.engines["a"]
    engine.start()
    engine.stop("activating")
    ended = replace(engine.status(), sub_state="auto-restart", result="exit-code", exec_main_status=1)
    world.do(UnitChanged("a", ended))
    world.do(UnitJobDone("a", job.op, "done", ended))
    assert world.life() is Life.FAILED
    world.run()
    assert world.outcomes[ticket].code is RefusalCode.WAKE_FAILED


def test_a_unit_that_nobody_waits_for_is_left_to_systemd():
    world = World(model(), running=("a",))
    world.run()
    engine = world.engines["a"]
    for _ in range(3):
        for sub in ("auto-restart", "start"):
            engine.run += sub == "start"
            world.do(UnitChanged("a", replace(engine.status(), active_state="activating", sub_state=sub)))
        assert world.life() is Life.STARTING
    engine.start()
    world.drift("a")
    world.run()
    assert world.life() is Life.READY


def test_a_start_whose_unit_cannot_be_read_afterwards_is_not_taken_for_a_failure():
    world = World(model())
    ticket = world.admit()
    (job,) = world.pending_of(RunUnitJob)
    world.pending.remove(job)
    world.engines["a"].start()
    world.do(UnitJobDone("a", job.op, "done", None))
    assert world.life() is Life.STARTING
    world.drift("a")
    world.run()
    assert isinstance(world.outcomes[ticket], Lease)
