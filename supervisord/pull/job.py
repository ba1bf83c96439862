"""What is to be fetched, and how it went: the one line that a pull gets on stdin, and the lines that it answers with.

The job comes on stdin and not as words of a command line, which every user of the machine can read: a replica's
environment may hold a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

#: ``weights`` of a repository of which everything is wanted, and of one of which only the small files are.
EVERYTHING, NO_WEIGHTS = "*", "none"


@dataclass(frozen=True, slots=True)
class Repository:
    """One repository of the hub, as the engine will ask for it."""

    #: ``org/name``.
    name: str
    #: What the engine needs it for: model, tokenizer, configuration, draft model, adapter.
    role: str
    #: A branch, a tag or a commit; empty: the hub's default branch.
    revision: str = ""
    #: vLLM's load format, by which it chooses among the weights of a repository; or one of the two above.
    weights: str = "auto"
    #: Where the weights go (``--download-dir``); empty: the hub's cache.
    directory: str = ""
    #: Patterns of files that the engine leaves out (``--ignore-patterns``).
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Fetch repositories with the hub's client of the engine's own Python."""

    repositories: tuple[Repository, ...]
    #: The engine's command before the model, by which its Python is found.
    command: tuple[str, ...]
    #: What the configuration adds to the replica's environment.
    env: Mapping[str, str] = field(default_factory=dict)
    #: ``--hf-token`` of the engine; empty: as the environment or a login has it.
    token: str = ""

    @property
    def title(self) -> str:
        return ", ".join(each.name for each in self.repositories)


@dataclass(frozen=True, slots=True)
class Image:
    """Fetch a container's image."""

    name: str
    #: The whole command that does it; its last word is the image.
    command: tuple[str, ...]
    #: ... and that prints the identity of the image that is here, or fails where there is none.
    inspect: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.name


Job = Weights | Image


def to_line(job: Job) -> str:
    """One line of JSON."""
    return json.dumps({"kind": type(job).__name__, **asdict(job)}) + "\n"


def from_line(line: str) -> Job:
    """The job of ``to_line``; raises ``ValueError``, ``LookupError`` or ``TypeError`` for anything else."""
    value = json.loads(line)
    kind = value.pop("kind")
    if kind == "Image":
        return Image(value["name"], tuple(value["command"]), tuple(value["inspect"]))
    if kind != "Weights":
        raise ValueError(f"no such job: {kind}")
    repositories = tuple(Repository(**{**each, "ignore": tuple(each["ignore"])}) for each in value["repositories"])
    return Weights(repositories, tuple(value["command"]), value["env"], value["token"])


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: in bytes where the size is known (else ``total`` is 0), or in the tool's own words."""

    name: str
    done: int = 0
    total: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Here now. ``fetched``: bytes that were not here before; 0 where all of it was, or it is not known (images)."""

    name: str
    new: bool
    fetched: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """Could not be fetched. ``code`` is for programs: NoHub, Gated, NoRepository, NoRevision, NoSpace, ..."""

    name: str
    code: str
    message: str


Event = Progress | Pulled | Failed

_EVENTS = {"progress": Progress, "pulled": Pulled, "failed": Failed}


def event_line(event: Event) -> str:
    return json.dumps({"event": type(event).__name__.lower(), **asdict(event)}) + "\n"


def read_event(line: str) -> Event | None:
    """The event of one line; None for a line that is none (a program of the engine's environment may print too)."""
    try:
        value = json.loads(line)
        event: Event = _EVENTS[value.pop("event")](**value)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return event
