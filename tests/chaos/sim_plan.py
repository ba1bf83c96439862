"""What a seed means: a fleet, and the list of things that happen to it from outside. Written before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from proxy.routing import POLICIES
from supervisord.core.spec import (
    Config,
    IdleLadder,
    ModelSpec,
    ReplicaSpec,
    ServeSpec,
    SupervisorSpec,
    WakeLimits,
)

#: Seconds; the long ones only where looks are rare, or an idle day would be nothing but looks.
SHORT_LADDERS = (
    IdleLadder(),
    IdleLadder(60.0, 300.0, 900.0),
    IdleLadder(sleep1=20.0, stop=400.0),
    IdleLadder(sleep2=45.0),
    IdleLadder(sleep1=30.0, sleep2=31.0),
    IdleLadder(stop=120.0),
)
LONG_LADDERS = (*SHORT_LADDERS, IdleLadder(600.0, 3600.0, 28800.0), IdleLadder(sleep2=7200.0, stop=36000.0))

#: Cards that a replica has; and what its name ends with when a reload gave it another one.
GPUS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1), ())
RENAMED = "-again"

#: What happens from outside, and how often beside the others.
KINDS = {
    "request": 40.0,
    "flood": 3.0,
    "long request": 3.0,
    "command to a replica": 4.0,
    "command to a model": 3.0,
    "reload": 4.0,
    "kill": 2.0,
    "kill at a step": 3.0,
    "terminate": 0.7,
    "engine dies": 2.0,
    "engine hangs": 1.0,
    "sleep by hand": 1.5,
    "wake by hand": 1.5,
    "systemctl": 3.0,
    "unit masked": 0.5,
    "unit unmasked": 0.5,
    "bus away": 1.0,
    "disk full": 0.7,
}


@dataclass(frozen=True)
class Item:
    """One thing that happens from outside; ``name`` seeds its particulars."""

    at: float
    name: str
    kind: str


@dataclass(frozen=True)
class Plan:
    """A whole history, but for what happens inside."""

    config: Config
    items: tuple[Item, ...]
    running_at_first: tuple[str, ...]


def plan(seed: int) -> Plan:
    """The same for one seed, always."""
    rng = Random(seed)
    config = _config(rng)
    # Every seed leaves some kinds out and has much of others.
    weights = {kind: weight * rng.choice((0.0, 0.5, 1.0, 1.0, 4.0)) for kind, weight in KINDS.items()}
    weights["request"] = max(weights["request"], 10.0)
    names, shares = list(weights), list(weights.values())
    items: list[Item] = []
    at = rng.choice((0.0, 0.01, 30.0))
    for number in range(rng.choice((8, 15, 15, 15, 30, 30, 60, 100))):
        at += _gap(rng, config.supervisor.probe_interval)
        items.append(Item(at, f"{number} {rng.random():.6f}", rng.choices(names, shares)[0]))
    items = sorted([*items, *_agents(seed, at)], key=lambda item: item.at)
    units = [replica.unit for model in config.models for replica in model.replicas]
    return Plan(config, tuple(items), tuple(unit for unit in units if rng.random() < 0.4))


def _agents(seed: int, until: float) -> list[Item]:
    """Long conversations that do not all fit into the KV caches, in half of the histories."""
    rng = Random(f"agents {seed}")
    count = rng.choice((0, 0, 1, 2))
    return [Item(rng.uniform(0.0, until), f"agents {number}", "agents") for number in range(count)]


def _gap(rng: Random, interval: float) -> float:
    """Seconds to the next thing; hours only where looks are rare, or they would be all there is."""
    sort = rng.random()
    if sort < 0.3:
        return rng.choice((0.0, 1e-4, 1e-3, 1e-2))
    if sort < 0.7:
        return rng.uniform(0.01, 5.0)
    if sort < 0.9:
        return rng.uniform(5.0, 120.0)
    if sort < 0.97 or interval < 100.0:
        return rng.uniform(120.0, 600.0)
    return rng.uniform(3600.0, 40000.0)


def _config(rng: Random) -> Config:
    interval = rng.choice((5.0, 20.0, 60.0, 60.0, 120.0, 120.0, 600.0))
    supervisor = SupervisorSpec(
        probe_interval=interval,
        backoff_max=rng.choice((10.0, 60.0, 300.0)),
        start_timeout=rng.choice((90.0, 200.0)),
        wake_step_timeout=rng.choice((10.0, 60.0)),
        sleep_timeout=rng.choice((10.0, 60.0)),
        stop_timeout=rng.choice((20.0, 60.0)),
        drain_timeout=rng.choice((1.0, 60.0)),
        gpu_memory=rng.choice((None, None, 3, 4)),
        nap_memory=rng.choice((None, None, 2)),
        min_residency=rng.choice((0.0, 20.0, 60.0)),
    )
    count = rng.choice((1, 1, 2, 2, 3))
    models = tuple(_model(rng, name, interval) for name in ("chat", "embed", "big")[:count])
    return Config(supervisor=supervisor, models=models)


def _model(rng: Random, name: str, interval: float) -> ModelSpec:
    replicas = tuple(_replica(rng, name, number) for number in range(rng.choice((1, 1, 2, 2, 3))))
    wake = WakeLimits(rng.choice((8.0, 60.0, 300.0)), rng.choice((4, 64)), canary=rng.random() < 0.3)
    return ModelSpec(
        name,
        replicas,
        aliases=(f"{name}-alias",),
        routing=rng.choice(sorted(POLICIES)),
        idle=_ladder(rng, interval),
        wake=wake,
        serve=ServeSpec("m"),
    )


def _ladder(rng: Random, interval: float) -> IdleLadder:
    return rng.choice(LONG_LADDERS if interval > 100.0 else SHORT_LADDERS)


def _replica(rng: Random, model: str, number: int) -> ReplicaSpec:
    name = f"{model}-{'abc'[number]}"
    gpus = rng.choice((GPUS[0], GPUS[1], (number,), *GPUS[2:]))
    bundled = rng.random() < 0.8
    unit = f"vllm@{name}.service" if bundled else f"{name}.service"
    memory = rng.choice((None, 1, 2, 3))
    return ReplicaSpec(
        name, model, unit, f"unix:/run/vllm/{name}/engine.sock", bundled, gpus, memory, rng.choice((None, 1, 2))
    )


def changed(config: Config, first: Config, rng: Random) -> Config:
    """``config`` with one thing done to it. ``first`` has everything that may be added again."""
    models = {model.name: model for model in config.models}
    target = rng.choice(first.models)
    model = models.get(target.name)
    interval = config.supervisor.probe_interval
    match rng.choice(("nothing", "model", "replica", "ladder", "serve", "wake", "name", "unit", "gpus")):
        case "model":
            if model is not None and len(models) > 1:
                del models[model.name]
            else:
                models[target.name] = target
        case "replica" if model is not None:
            gone = rng.choice(target.replicas)
            kept = tuple(r for r in model.replicas if _first_name(r) != gone.name)
            added = (*model.replicas, gone)
            has_it = len(kept) < len(model.replicas)
            models[target.name] = replace(
                model, replicas=kept if has_it and kept else model.replicas if has_it else added
            )
        case "ladder" if model is not None:
            models[target.name] = replace(model, idle=_ladder(rng, interval))
        case "serve" if model is not None:
            models[target.name] = replace(model, serve=ServeSpec("m", args=(str(rng.randrange(3)),)))
        case "wake" if model is not None:
            models[target.name] = replace(model, wake=replace(model.wake, max_waiting=rng.choice((4, 64))))
        case "name" | "unit" | "gpus" as what if model is not None:
            place = rng.randrange(len(model.replicas))
            other = _other(model.replicas[place], what, rng)
            replicas = (*model.replicas[:place], other, *model.replicas[place + 1 :])
            models[target.name] = replace(model, replicas=replicas)
        case _:
            pass
    order = [m.name for m in first.models]
    return replace(config, models=tuple(sorted(models.values(), key=lambda m: order.index(m.name))))


def _first_name(replica: ReplicaSpec) -> str:
    return replica.name.removesuffix(RENAMED)


def _other(replica: ReplicaSpec, what: str, rng: Random) -> ReplicaSpec:
    """Another name for it (and for its unit, where that is named after it), another unit, or another GPU."""
    if what == "gpus":
        return replace(replica, gpus=rng.choice(GPUS))
    name, bundled = replica.name, replica.bundled
    if what == "name":
        name = _first_name(replica) if name.endswith(RENAMED) else name + RENAMED
        if not bundled:
            return replace(replica, name=name)
    else:
        bundled = not bundled
    unit = f"vllm@{name}.service" if bundled else f"{_first_name(replica)}.service"
    return replace(replica, name=name, unit=unit, bundled=bundled, endpoint=f"unix:/run/{unit}/engine.sock")
