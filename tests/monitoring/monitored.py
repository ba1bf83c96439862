"""A fleet that is made up, requests that are over, and what is scraped of them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from proxy.exchange import Finished, Outcome, Stage
from proxy.reading.usage import Usage
from proxy.tally import RequestTally
from supervisord.core.admission import Placement
from supervisord.core.spec import ModelSpec, ReplicaSpec
from supervisord.core.states import Health, Hold, Life
from supervisord.core.view import FleetView, ModelView, ReplicaView
from supervisord.fleet_events import FleetEvents
from supervisord.monitoring.collector import Sources, exposition
from supervisord.monitoring.lag import LoopLag

ROUTE = "/v1/chat/completions"


def replica(name: str, model: str = "chat", **changes: object) -> ReplicaView:
    values: dict[str, object] = {
        "name": name,
        "model": model,
        "state": Life.READY,
        "sleep_level": 0,
        "health": Health.OK,
        "hold": Hold.NONE,
        "step": "",
        "unit": f"vllm@{name}.service",
        "endpoint": f"unix:/run/{name}.sock",
        "gpus": (0,),
        "in_flight": 0,
        "last_error": "",
        "state_since": 1_700_000_000.0,
        "idle_since": 1_700_000_100.0,
        "wake_seconds": 0.0,
        "start_seconds": 0.0,
        "max_model_len": 0,
        "served_names": (),
        "simulated": True,
        "can_sleep": True,
        "retry_at": 0.0,
    }
    return ReplicaView(**{**values, **changes})


def fleet(*replicas: ReplicaView, waiting: int = 0, draining: bool = False) -> FleetView:
    names = list(dict.fromkeys(each.model for each in replicas))
    models = []
    for name in names:
        mine = [each for each in replicas if each.model == name]
        members = tuple(each.name for each in mine)
        models.append(
            ModelView(
                name, (), "prefill", mine[0].state, False, sum(r.in_flight for r in mine), waiting, 0.0, 0.0, 0, members
            )
        )
    return FleetView(tuple(models), replicas, draining)


def spec(
    name: str = "chat", aliases: tuple[str, ...] = ("default",), replicas: tuple[str, ...] = ("a", "b")
) -> ModelSpec:
    specs = tuple(ReplicaSpec(r, name, f"vllm@{r}.service", f"unix:/run/{r}.sock") for r in replicas)
    return ModelSpec(name, specs, aliases)


def over(
    tally: RequestTally,
    *,
    model: str = "chat",
    replica: str = "a",
    status: int = 200,
    code: str = "",
    seconds: float = 2.0,
    **more: object,
) -> None:
    """A request is over; without a ``replica`` it was never let in."""
    values: dict[str, object] = {"placement": Placement.COLD if replica else None, "attempts": 1 if replica else 0}
    outcome = Outcome(status=status, code=code, model=model, replica=replica, **{**values, **more})
    tally(Finished("POST", ROUTE, "id", "127.0.0.1", 100.0, 100.0 + seconds), outcome)


def streamed(tally: RequestTally) -> None:
    """A stream that waited for 3 s and had its first token after 4.5."""
    over(
        tally,
        seconds=30.0,
        stream=True,
        queued=3.0,
        computed=104.5,
        bytes_received=400,
        bytes_sent=9000,
        usage=Usage(1000, 50, 800),
        placement=Placement.STAYS,
        stage=Stage.STREAM,
    )


def sources(view: FleetView, events: FleetEvents | None = None, tally: RequestTally | None = None) -> Sources:
    return Sources(lambda: view, events or FleetEvents(), tally or RequestTally(), LoopLag(), lambda: (7, 3))


async def scraped(given: Sources) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels, without our prefix, as Prometheus' parser reads it."""
    body, _ = await exposition(given, "")
    return samples(body.decode())


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name.removeprefix("vllm_supervisord_"), frozenset(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def at(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))
