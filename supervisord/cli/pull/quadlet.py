"""The image of a podman Quadlet, from its source file and from the command that podman made of it. Pure.

The command alone does not tell: among the words of ``podman run`` only podman knows which one is the image. The source
does, but drop-ins may lie in many places. So: the word of the command that some file beside it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from supervisord.pull.job import Image

#: Options of ``podman run`` that say how an image is fetched, and mean the same to ``podman pull``.
_ALIKE = ("--authfile", "--tls-verify", "--cert-dir", "--creds", "--platform", "--arch", "--os", "--variant")


def images_of(texts: Iterable[str]) -> list[str]:
    """Every ``Image=`` of a Quadlet's text and of its drop-ins, in order."""
    found = []
    for text in texts:
        joined = re.sub(r"\\\n", " ", text)
        found += re.findall(r"^[ \t]*Image[ \t]*=[ \t]*(\S.*?)[ \t]*$", joined, re.MULTILINE)
    return found


def image_of(command: Sequence[str], names: Sequence[str]) -> Image | None:
    """How to fetch the image that ``command`` (``podman ... run ...``) runs: the last of ``names`` that is in it."""
    if "run" not in command:
        return None
    run = command.index("run")
    # A container may be called as its image is.
    places = {word: at for at, word in reversed([*enumerate(command)]) if at > run and command[at - 1] != "--name"}
    name = next((name for name in reversed(names) if name in places), None)
    if name is None:
        return None
    before, options = tuple(command[:run]), command[run + 1 : places[name]]
    alike = []
    for option, value in zip(options, [*options[1:], ""], strict=True):
        if option.partition("=")[0] in _ALIKE:
            alike += [option] if "=" in option else [option, value]
    return _image(before, (*before, "pull", *alike), name)


def image_of_pull(command: Sequence[str]) -> Image | None:
    """The same for the unit of an ``.image`` file, whose command is the pull itself."""
    if "pull" not in command:
        return None
    return _image(tuple(command[: command.index("pull")]), tuple(command[:-1]), command[-1])


def _image(podman: tuple[str, ...], pull: tuple[str, ...], name: str) -> Image:
    # An ``.image`` file makes it ``podman image pull``.
    podman = podman[:-1] if podman[-1:] == ("image",) else podman
    return Image(name, (*pull, name), (*podman, "image", "inspect", "--format", "{{.Id}}", name))
