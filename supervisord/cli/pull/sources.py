"""Which repositories of the hub an engine will ask for, by its command line. Pure but for ``exists``.

What vLLM 0.32 does: the model's weights by ``--revision``, ``--load-format``, ``--ignore-patterns`` into
``--download-dir``; everything else of the repository into the hub's cache; a tokenizer, a configuration, a draft model
and adapters of their own where they are named. A name that is a path on this machine is never asked of the hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisord.core.spec import ServeSpec
from supervisord.launcher.command import option_words
from supervisord.pull.job import EVERYTHING, NO_WEIGHTS, Repository

_SHORT = {"-sc": "speculative-config"}
#: Single options for what the table of --speculative-config says too.
_DRAFT = {"speculative-config.model": "model", "speculative-config.revision": "revision", "spec-model": "model"}
#: vLLM's default (vllm/config/load.py): the second copy that some repositories carry.
_IGNORED = ("original/**/*",)


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that an engine reads before it serves, as far as its command line names it."""

    repositories: tuple[Repository, ...]
    #: Paths on this machine, there or not.
    local: tuple[str, ...]
    #: Names of stores that only the engine's own loader can read (``s3://...``).
    foreign: tuple[str, ...]
    #: ``--hf-token``, where it is a text.
    token: str = ""


def sources(serve: ServeSpec, home: str, exists: Callable[[str], bool]) -> Sources:
    """What the engine of ``serve`` reads. ``home``: where its unit runs; ``exists``: is there such a path?"""
    options = _options(
        [word for option, value in serve.options.items() for word in option_words(option, value)] + list(serve.args)
    )

    def option(name: str) -> str:
        return options.get(name, [""])[-1] if options.get(name) else ""

    directory, ignore = option("download-dir"), tuple(options.get("ignore-patterns", ())) or _IGNORED
    wanted = [
        Repository(
            serve.model, "model", option("revision"), option("load-format").lower() or "auto", directory, ignore
        ),
        Repository(option("tokenizer"), "tokenizer", option("tokenizer-revision"), NO_WEIGHTS, directory),
        Repository(option("hf-config-path"), "configuration", "", NO_WEIGHTS),
        _draft(options, directory, ignore),
        *(Repository(adapter, "adapter", weights=EVERYTHING) for adapter in _adapters(options)),
    ]
    if wanted[1].name == serve.model and wanted[1].revision in ("", wanted[0].revision):
        wanted.pop(1)  # comes with the model
    repositories, local, foreign = [], [], []
    for each in wanted:
        if not each.name:
            continue
        if "://" in each.name:
            foreign.append(each.name)
        elif each.name.startswith(("/", "./", "../", "~")) or exists(str(Path(home, each.name))):
            local.append(str(Path(home, each.name[2:] if each.name.startswith("~/") else each.name)))
        else:
            repositories.append(each)
    return Sources(tuple(dict.fromkeys(repositories)), tuple(dict.fromkeys(local)), tuple(foreign), option("hf-token"))


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each ``--option``, as argparse would take them: the last one of an option counts."""
    options: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--") or word in _SHORT:
            name, equals, value = word.removeprefix("--").partition("=")
            name = _SHORT.get(name, name).replace("_", "-")
            values = [value] if equals else []
            if name == "lora-modules":  # given again, it adds
                values = [*options.get(name, ()), *values]
            options[name] = values
        elif word.startswith("-") and word[1:2].isalpha():
            values = None  # another option of one letter
        elif values is not None:
            values.append(word)
    return options


def _draft(options: Mapping[str, Sequence[str]], directory: str, ignore: tuple[str, ...]) -> Repository:
    given: dict[str, Any] = {}
    for text in options.get("speculative-config", ())[-1:]:
        given = _table(text)
    for option, key in _DRAFT.items():
        if values := options.get(option):
            given[key] = values[-1]
    model, revision = given.get("model"), given.get("revision")
    name = model if isinstance(model, str) and not model.startswith("[") else ""
    return Repository(name, "draft model", revision if isinstance(revision, str) else "", "auto", directory, ignore)


def _adapters(options: Mapping[str, Sequence[str]]) -> list[str]:
    """``NAME=PATH``, or a JSON table with ``path``."""
    paths = []
    for text in options.get("lora-modules", ()):
        path = _table(text).get("path") if text.lstrip().startswith("{") else text.partition("=")[2]
        if isinstance(path, str) and path:
            paths.append(path)
    return paths


def _table(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}  # the engine will say what is wrong with it
    return value if isinstance(value, dict) else {}
