"""What random histories (tests/chaos) found, each in its shortest form."""

from dataclasses import replace

from world import IdleLadder, Life, Phase, ShutDown, SupervisorSpec, Verb, World, model

from supervisord.core.actions import Call, CallEngine, CommandFailure, NoteKind, Persist, ProbeEngine, RunUnitJob
from supervisord.core.admission import Ending, Lease
from supervisord.core.events import Configured, UnitChanged, UnitJobDone
from supervisord.core.readings import UnitStatus
from supervisord.core.step import next_due


def asleep_world(level=1, **options) -> World:
    world = World(model(**options), running=("a",))
    world.run()
    world.command("a", Verb.SLEEP, level)
    world.run()
    assert world.life() is Life.ASLEEP
    return world


def test_an_engine_slept_by_hand_during_our_wake_is_woken_with_its_weights_loaded_again():
    world = asleep_world(level=1)
    engine = world.engines["a"]
    world.admit()
    world.complete(world.pending[0])  # the intent
    (wake,) = world.pending_of(CallEngine)
    world.complete(wake)
    engine.level, engine.whole = 2, False  # POST /sleep?level=2, by somebody
    (look,) = world.pending_of(ProbeEngine)
    world.complete(look)
    world.run()
    assert world.life() is Life.READY
    assert engine.whole
    assert f"{Call.RELOAD_WEIGHTS}" in engine.calls


def test_a_late_reading_of_the_run_before_does_not_end_a_start():
    world = World(model())
    world.engines["a"].start()
    world.engines["a"].stop("failed")
    world.drift("a")
    world.engines["a"].active = "inactive"  # reset before the start; read then, told later
    late = world.engines["a"].status()
    world.command("a", Verb.START)
    while world.pending_of(RunUnitJob):
        world.complete(world.pending[0])
    world.do(UnitChanged("a", late))
    assert world.life() is Life.STARTING
    world.run()
    assert world.life() is Life.READY


def test_a_full_disk_does_not_make_the_idle_ladder_run_in_circles():
    world = World(model(idle=IdleLadder(sleep1=60)), running=("a",))
    world.run()
    world.later(60)
    tries = 0
    while world.pending_of(Persist):
        tries += 1
        assert tries < 3
        for write in world.pending_of(Persist):
            world.complete(write, error="no space left on device")
    assert world.life() is Life.READY
    world.later(29)
    assert not world.pending
    world.later(2)
    world.run()
    assert world.life() is Life.ASLEEP


def test_the_clock_of_an_idle_rung_stands_still_while_shutting_down():
    world = World(model(idle=IdleLadder(sleep1=1)), running=("a",))
    world.run()
    world.do(ShutDown())
    world.later(1)
    assert next_due(world.fleet) > world.now  # it would be due for ever, and never taken


def test_who_waits_for_another_start_is_let_in_when_a_replica_on_trial_answers_again():
    world = World(model(replicas=("a", "b")), running=("a",))
    world.run()
    long, failed = world.admit(), world.admit()
    world.finish(failed, Ending.CONNECT_FAILED, "reset")
    world.later(0.1)  # a look, and the replica is on trial
    trial = world.admit()
    assert isinstance(trial, Lease)
    world.command("b", Verb.START)
    ticket = world.admit()
    assert isinstance(ticket, int)
    world.finish(trial)
    assert world.outcomes[ticket].replica == "a"
    assert long.id in world.open


def test_a_wake_that_fails_during_the_shutdown_starts_nothing():
    world = asleep_world(level=2)
    world.admit()
    world.complete(world.pending[0])
    world.do(ShutDown())
    world.complete(world.pending_of(CallEngine)[0], error="out of memory")
    assert not world.pending_of(RunUnitJob)
    assert world.disk["a"].phase is Phase.WAKING  # the next supervisor finishes it


def test_an_engine_that_somebody_slept_at_level_2_is_not_taken_for_our_own_level_1_sleeper():
    world = World(model(), running=("a",))
    world.run()
    engine = world.engines["a"]
    engine.level, engine.whole = 2, False  # by hand, and not looked at since
    world.command("a", Verb.SLEEP, 1)
    world.run()
    assert world.life() is Life.ASLEEP
    world.admit()
    world.run()
    assert world.life() is Life.READY
    assert engine.whole


def test_a_missed_look_before_a_sleep_puts_it_off_and_restarts_nothing():
    world = World(model(), running=("a",))
    world.run()
    ticket = world.command("a", Verb.SLEEP, 1)
    world.complete(world.pending_of(ProbeEngine)[0], error="no answer in time")
    assert world.answers[ticket].failure is CommandFailure.SLEEP_FAILED
    assert world.life() is Life.READY
    assert not world.pending_of(RunUnitJob)


def test_a_stop_that_was_refused_is_tried_again_and_does_not_keep_the_gpu_from_others_for_ever():
    world = World(model(replicas=("a", "b"), gpus={"a": (0,), "b": (0,)}), running=("a",))
    world.run()
    world.command("a", Verb.STOP)
    world.complete(world.pending_of(RunUnitJob)[0], error="no reply")
    assert world.life("a") is Life.FAILED
    world.command("b", Verb.START)
    world.run()
    assert world.life("b") is Life.STOPPED  # the unit of a is still up
    world.later(5)
    world.run()
    assert world.life("a") is Life.STOPPED
    assert world.life("b") is Life.READY


def test_a_start_that_finds_no_room_is_answered_within_the_start_timeout():
    supervisor = SupervisorSpec(gpu_memory=80, start_timeout=300)
    world = World(
        model("chat", ("a",), {"a": (0,)}, memory=60),
        model("embed", ("b",), {"b": (0,)}, memory=60),
        supervisor=supervisor,
        running=("a",),
    )
    world.run()
    world.command("a", Verb.DRAIN)  # held by an operator: nobody may ask it to rest
    ticket = world.command("b", Verb.START)
    world.later(301)
    assert world.answers[ticket].failure is CommandFailure.INSUFFICIENT_MEMORY
    assert world.life("a") is Life.READY


def test_a_burst_does_not_make_a_replica_rest_for_its_own_sibling():
    supervisor = SupervisorSpec(gpu_memory=80, min_residency=0, make_room_after=0)
    world = World(model(replicas=("a", "b"), gpus={"a": (0,), "b": (0,)}, memory=60), supervisor=supervisor)
    tickets = [world.admit() for _ in range(4)]
    world.run()
    assert all(isinstance(world.outcomes[ticket], Lease) for ticket in tickets)
    assert world.noted(NoteKind.EVICTED) == 0


def test_a_disk_that_hangs_before_a_sleep_restarts_nothing():
    world = World(model(idle=IdleLadder(sleep1=60)), running=("a",))
    world.run()
    world.later(60)
    assert world.pending_of(Persist)
    world.later(20)  # the write never ends
    assert world.life() is Life.READY
    assert not world.pending_of(RunUnitJob)


def test_a_command_to_a_replica_that_a_reload_takes_away_is_answered_and_starts_nothing():
    world = World(model(replicas=("a", "b"), gpus={"a": (0,), "b": (0,)}))
    tickets = [world.command("a", Verb.WAKE), world.command("b", Verb.WAKE)]  # b waits for the GPU
    world.do(Configured((model("other", ("c",)),), SupervisorSpec()))
    assert [world.answers[ticket].failure for ticket in tickets] == [CommandFailure.GONE] * 2
    assert "b" not in [job.replica for job in world.pending_of(RunUnitJob)]


def test_a_late_reading_of_a_start_that_is_over_is_no_restart():
    world = World(model(), running=("a",))
    world.run()
    world.command("a", Verb.SLEEP, 2)
    late = replace(world.engines["a"].status(), active_state="activating", sub_state="start")
    world.do(UnitChanged("a", late))
    assert world.life() is Life.FALLING_ASLEEP
    world.do(UnitChanged("a", replace(late, sub_state="auto-restart")))
    assert world.life() is Life.STARTING


def test_a_unit_that_tells_no_run_while_it_is_masked_is_believed_again_later():
    world = World(model(), running=("a",))
    world.run()
    run_before = world.engines["a"].status().invocation
    world.command("a", Verb.STOP)
    (job,) = world.pending_of(RunUnitJob)
    masked = UnitStatus("vllm@a.service", "masked", "inactive", "dead")
    world.do(UnitJobDone("a", job.op, "done", masked))
    failed = UnitStatus("vllm@a.service", "loaded", "failed", "failed", run_before, "timeout")
    world.do(UnitChanged("a", failed))
    assert world.replica().unit == failed


def test_a_sleeper_that_somebody_woke_gets_its_weights_only_when_nobody_else_is_at_work_on_its_gpu():
    world = World(model(replicas=("a", "b"), gpus={"a": (0,), "b": (0,)}), running=("a", "b"))
    world.run()
    world.command("a", Verb.SLEEP, 2)
    world.run()
    world.command("b", Verb.SLEEP, 1)
    world.engines["a"].level = 0  # POST /wake_up, by somebody: awake, and without its weights
    world.later(10)
    for look in world.pending_of(ProbeEngine):
        if look.replica == "a":
            world.complete(look)
    assert (world.life("a"), world.life("b")) == (Life.ASLEEP, Life.FALLING_ASLEEP)
    world.run()
    world.later(10)
    world.run()
    assert world.life("b") is Life.ASLEEP
    assert world.life("a") is Life.READY
    assert world.engines["a"].whole


def test_a_reading_that_is_older_than_what_is_known_is_no_news():
    world = World(model(), running=("a",))
    world.run()
    now = world.engines["a"].status()
    world.do(UnitChanged("a", replace(now, changed=2_000)))
    world.command("a", Verb.SLEEP, 2)
    late = replace(now, active_state="inactive", sub_state="dead", invocation=f"{99:032x}", changed=1_000)
    world.do(UnitChanged("a", late))
    assert world.life() is Life.FALLING_ASLEEP
    world.do(UnitChanged("a", replace(late, changed=3_000)))
    assert world.life() is Life.STOPPED


def test_an_idle_engine_that_somebody_restarts_before_it_rests_is_not_stopped_while_it_loads():
    world = World(
        model(replicas=("a",), gpus={"a": (0,)}, idle=IdleLadder(stop=60)),
        model("other", ("b",), gpus={"b": (0,)}),
        running=("a",),
    )
    world.run()
    world.command("b", Verb.START)  # at work on the GPU when the time of a has come
    world.later(60)
    assert world.life("a") is Life.DRAINING
    world.engines["a"].start()
    world.drift("a")
    world.run()
    assert (world.life("a"), world.engines["a"].run) == (Life.READY, 2)
