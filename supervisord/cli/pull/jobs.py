"""What has to be fetched for each replica, so that what several need is fetched once."""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from supervisord.cli.exits import Exit, Report
from supervisord.cli.pull.quadlet import image_of, image_of_pull, images_of
from supervisord.cli.pull.sources import sources
from supervisord.cli.pull.units import Surroundings, Unit, Units
from supervisord.core.spec import ModelSpec, ReplicaSpec
from supervisord.launcher.command import GPU_VARIABLES
from supervisord.launcher.explain import LOG_VARIABLE
from supervisord.pull.engine import CONTAINERS
from supervisord.pull.job import Image, Job, Weights

_NOWHERE = Surroundings()
#: Variables that each replica has its own of, and no download looks at.
_OF_ONE = frozenset({*GPU_VARIABLES, LOG_VARIABLE, "PODMAN_SYSTEMD_UNIT"})


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica needs: a ``job`` in the surroundings of its unit; or nothing, and ``why``; or a ``failure``."""

    model: str
    replica: str
    job: Job | None = None
    surroundings: Surroundings = _NOWHERE
    why: str = ""
    failure: Report | None = None

    @property
    def key(self) -> object:
        """Equal for needs that one pull serves: what tells one replica of a model from another is no difference."""
        variables = [each for each in self.surroundings.environment if each.partition("=")[0] not in _OF_ONE]
        return (repr(self.job), replace(self.surroundings, environment=tuple(sorted(variables))))


def need_of(model: ModelSpec, replica: ReplicaSpec, units: Units, home: str) -> Need:
    """Raises ``Failure`` where the service manager does not answer."""
    unit = units.unit(replica.unit)
    if unit.load_state != "loaded":
        state = "is missing" if unit.load_state == "not-found" else f"is {unit.load_state}"
        return _failed(model, replica, "NoUnit", f"its unit {unit.name} {state} ('vllmctl doctor' says how to mend it)")
    if replica.bundled:
        return _bundled(model, replica, unit, home)
    return _own(model, replica, unit, units)


def _bundled(model: ModelSpec, replica: ReplicaSpec, unit: Unit, home: str) -> Need:
    serve = model.serve
    assert serve is not None, "the configuration is checked"
    if serve.engine == "simulator" and not serve.command:
        return Need(model.name, replica.name, why="nothing to fetch: it is simulated")
    command = serve.command or ("vllm", "serve")
    if Path(command[0]).name in CONTAINERS:
        why = f"nothing known to fetch: its command is {command[0]}, and what runs in a container is its own"
        return Need(model.name, replica.name, why=why)
    found = sources(serve, _home(unit.surroundings, home), _exists)
    if missing := [path for path in found.local if not _exists(path)]:
        return _failed(model, replica, "NoFile", f"cannot find {', '.join(missing)}: there is nothing there to load")
    if found.foreign:
        return _failed(model, replica, "Foreign", f"only the engine itself can read {', '.join(found.foreign)}")
    if not found.repositories:
        return Need(model.name, replica.name, why=f"nothing to fetch: {', '.join(found.local)} is on this machine")
    job = Weights(found.repositories, command, dict(serve.env), found.token)
    return Need(model.name, replica.name, job, unit.surroundings)


def _own(model: ModelSpec, replica: ReplicaSpec, unit: Unit, units: Units) -> Need:
    if not unit.source.endswith(".container"):
        why = f"nothing known to fetch: {unit.name} is a unit of your own, and it alone knows what it loads"
        return Need(model.name, replica.name, why=why)
    names = images_of(_texts(Path(unit.source)))
    if names and names[-1].endswith(".build"):
        return Need(model.name, replica.name, why=f"nothing to fetch: its image is built here, from {names[-1]}")
    image = _of_image_unit(names[-1], unit, units) if names and names[-1].endswith(".image") else None
    image = image or image_of(unit.command, names)
    if image is None:
        return _failed(model, replica, "NoImage", f"cannot tell which image {unit.name} runs, from {unit.source}")
    if image.name.startswith("localhost/"):
        return Need(model.name, replica.name, why=f"nothing to fetch: its image {image.name} was made on this machine")
    return Need(model.name, replica.name, image, unit.surroundings)


def _home(surroundings: Surroundings, home: str) -> str:
    """Where the unit's processes are at home, and begin."""
    if surroundings.user:
        try:
            return pwd.getpwnam(surroundings.user).pw_dir
        except KeyError:
            return home  # systemd will say that there is no such user
    return home


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:
        return False


def _of_image_unit(file: str, unit: Unit, units: Units) -> Image | None:
    for name in unit.requires:
        if name.endswith(".service") and Path((other := units.unit(name)).source).name == file:
            return image_of_pull(other.command)
    return None


def _texts(source: Path) -> Iterable[str]:
    """The Quadlet, then its drop-ins."""
    folders = [source.with_name(f"{source.name}.d")]
    if "@" in source.name:
        folders.insert(0, source.with_name(f"{source.name.partition('@')[0]}@.container.d"))
    for file in [source, *(file for folder in folders for file in sorted(folder.glob("*.conf")))]:
        try:
            yield file.read_text(errors="replace")
        except OSError:
            continue


def _failed(model: ModelSpec, replica: ReplicaSpec, code: str, message: str) -> Need:
    return Need(model.name, replica.name, failure=Report(code, message, Exit.FAILED))
