"""The fleet's snapshot becomes objects with typed properties; a difference is exactly what changed."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisord.bus.calls import variants
from supervisord.bus.interfaces import load_interfaces
from supervisord.bus.names import ROOT_PATH
from supervisord.bus.objects import ManagerFacts, difference, microseconds, tree_of
from supervisord.core.states import Health, Hold, Life
from supervisord.core.view import FleetView, ModelView, ReplicaView

#: A busy machine is slow; that says nothing about the code.
patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FACTS = ManagerFacts("1", ("127.0.0.1:8000",), ("/etc/a.toml",), "/var/lib/x", simulated=False)

counts = st.integers(0, 2**31)
seconds = st.floats(0, 4e9)
texts = st.text(max_size=8)
labels = st.tuples(texts) | st.tuples()
replicas = st.builds(
    ReplicaView,
    name=texts,
    model=texts,
    state=st.sampled_from(Life),
    sleep_level=st.integers(0, 2),
    health=st.sampled_from(Health),
    hold=st.sampled_from(Hold),
    step=texts,
    unit=texts,
    endpoint=texts,
    gpus=st.tuples(counts),
    in_flight=counts,
    last_error=texts,
    state_since=seconds,
    idle_since=seconds,
    wake_seconds=seconds,
    start_seconds=seconds,
    max_model_len=counts,
    served_names=labels,
    simulated=st.booleans(),
    can_sleep=st.booleans(),
    retry_at=seconds,
)
models = st.builds(
    ModelView,
    name=texts,
    aliases=labels,
    routing=texts,
    state=st.sampled_from(Life),
    held=st.booleans(),
    in_flight=counts,
    waiting=counts,
    waiting_for_kv=counts,
    idle_since=seconds,
    wake_seconds=seconds,
    max_model_len=counts,
    replicas=labels,
)
fleets = st.builds(
    FleetView,
    models=st.lists(models, max_size=2, unique_by=lambda model: model.name).map(tuple),
    replicas=st.lists(replicas, max_size=2, unique_by=lambda replica: replica.name).map(tuple),
    draining=st.booleans(),
)


@patiently
@given(fleets)
def test_every_fleet_has_exactly_the_properties_of_the_xml_in_their_types(fleet: FleetView) -> None:
    interfaces = load_interfaces()
    for exported in tree_of(fleet, FACTS).values():
        interface = interfaces[exported.interface]
        assert exported.values.keys() == interface.properties.keys()
        variants(interface, exported)  # raises where a value does not fit its type


@patiently
@given(fleets, fleets)
def test_a_client_that_applies_the_difference_knows_the_new_state(before: FleetView, after: FleetView) -> None:
    old, new = tree_of(before, FACTS), tree_of(after, FACTS)
    what = difference(old, new)
    known: dict[str, Any] = {path: dict(exported.values) for path, exported in old.items()}
    for path in what.removed:
        del known[path]
    for path in what.added:
        assert path not in known
        known[path] = dict(new[path].values)
    for path, values in what.changed.items():
        assert values
        for name, value in values.items():
            assert known[path][name] != value
            known[path][name] = value
    assert known == {path: exported.values for path, exported in new.items()}


@patiently
@given(fleets)
def test_what_is_the_same_differs_in_nothing(fleet: FleetView) -> None:
    what = difference(tree_of(fleet, FACTS), tree_of(dataclasses.replace(fleet), FACTS))
    assert (what.removed, what.added, dict(what.changed)) == ((), (), {})


@patiently
@given(replicas)
def test_one_simulated_replica_makes_the_manager_say_so(replica: ReplicaView) -> None:
    fleet = FleetView((), (dataclasses.replace(replica, simulated=True),), draining=False)
    assert tree_of(fleet, FACTS)[ROOT_PATH].values["Simulated"] is True
    fleet = FleetView((), (dataclasses.replace(replica, simulated=False),), draining=False)
    assert tree_of(fleet, FACTS)[ROOT_PATH].values["Simulated"] is False


def test_seconds_become_whole_microseconds_and_never_negative() -> None:
    assert microseconds(1_700_000_000.25) == 1_700_000_000_250_000
    assert microseconds(0.0) == 0
    assert microseconds(-1.0) == 0
