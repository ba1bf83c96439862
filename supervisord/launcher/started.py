"""What a bundled engine was started with, left for the daemon: ``$XDG_RUNTIME_DIR/vllm/NAME/started.json``.

systemd removes that folder when the unit's run ends, so the file is about the engine that runs. A configuration may
change while no daemon runs, or one may die in the middle of taking it in; the daemon after it compares.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from supervisord.core.spec import Config, ReplicaSpec
from supervisord.launcher.command import Launch, LaunchError, find, launch

log = logging.getLogger(__name__)

FILE = "started.json"


@dataclass(frozen=True, slots=True)
class Started:
    """One running engine."""

    replica: str
    model: str
    #: The main configuration file that it was started from.
    config: str
    #: Of its command line and of what the configuration adds to its environment.
    digest: str
    endpoint: str
    gpus: tuple[int, ...]


def write(plan: Launch, config: Config, runtime_dir: Path) -> None:
    """Leave word of a start; where there is no folder of the unit's (started by hand), or no room, nobody gets word."""
    gpus = find(config, plan.replica)[1].gpus
    value = {
        "model": plan.served_name,
        "config": config.files[0],
        "digest": digest(plan),
        "endpoint": str(plan.endpoint),
        "gpus": gpus,
    }
    try:
        (runtime_dir / "vllm" / plan.replica / FILE).write_text(json.dumps(value) + "\n")
    except OSError as error:
        sys.stderr.write(f"vllm-replica: cannot leave word of what is started: {error}\n")


def read_all(runtime_dir: Path) -> list[Started]:
    """Every bundled engine that runs, by its replica's name. One that left no word, or one of another make, is not."""
    found = []
    for file in sorted((runtime_dir / "vllm").glob(f"*/{FILE}")):
        try:
            value = json.loads(file.read_text())
            model, config, hashed, endpoint = (str(value[key]) for key in ("model", "config", "digest", "endpoint"))
            gpus = tuple(int(gpu) for gpu in value["gpus"])
            found.append(Started(file.parent.name, model, config, hashed, endpoint, gpus))
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning("cannot tell what %s was started with: %s: %s", file.parent.name, file, error)
    return found


def compare(
    config: Config, running: Sequence[Started], env: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[ReplicaSpec, ...]]:
    """Those of ``running`` whose command is another one now, and those that ``config`` has no more.

    An engine of another configuration file is another daemon's. ``env``: the environment of units, as far as it
    matters to a command (HOME).
    """
    bundled = {r.name: (model, r) for model in config.models for r in model.replicas if r.bundled}
    outdated, left_over = [], []
    for engine in running:
        if engine.replica in bundled:
            try:
                same = digest(launch(*bundled[engine.replica], env)) == engine.digest
            except LaunchError:
                continue  # it could not be started again
            if not same:
                outdated.append(engine.replica)
        elif config.files[:1] == (engine.config,):
            unit = f"vllm@{engine.replica}.service"
            left_over.append(ReplicaSpec(engine.replica, engine.model, unit, engine.endpoint, True, engine.gpus))
    return tuple(outdated), tuple(left_over)


def digest(plan: Launch) -> str:
    """Of all that the configuration decides about one start. (API keys are in there: it is not to be turned back.)"""
    # Which Python of the same installation runs the simulator is no difference.
    program = "python" if plan.argv[0] == sys.executable else plan.argv[0]
    words = [program, *plan.argv[1:], *(f"{name}={plan.env[name]}" for name in plan.set_here)]
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()
