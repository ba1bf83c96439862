"""Runs in the engine's Python, whatever version that is (3.10 is enough), and imports nothing of ours.

Reads repositories as JSON from stdin, fetches them with that Python's huggingface_hub into the cache in which its vLLM
will look, and prints what happens, one JSON object a line. Which files: those that vLLM's loader would choose, and
everything that is no weights. SIGTERM ends it, and takes the half of a file away that nobody could go on with.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

#: Files with weights in one format or another; what is none of these is small and fetched in any case.
_KINDS = (
    "safetensors",
    "bin",
    "pt",
    "pth",
    "ckpt",
    "gguf",
    "h5",
    "msgpack",
    "onnx",
    "onnx_data",
    "ot",
    "npz",
    "tflite",
)
WEIGHTS = tuple(f"*.{kind}" for kind in _KINDS)
#: Load format of vLLM -> patterns of weights, the first of which that is there counts.
FORMATS = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "bitsandbytes": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "runai_streamer": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
    "dummy": (),
    "none": (),
}
INDEX = "model.safetensors.index.json"
#: Modules of sentence-transformers, which vLLM reads from their own folders.
MODULES = re.compile(r"\d+_\w+/(model\.safetensors|pytorch_model\.bin)")
#: Seconds between two looks at how much is here.
TICK = 0.5


class Refused(Exception):
    """It cannot be fetched: a code for programs, a sentence for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def main() -> int:
    """Fetch them all; one that fails does not keep the others from being fetched. Returns the exit status."""
    # Python puts the folder of a script first, and there are modules of ours in it.
    sys.path[:] = [place for place in sys.path if place != str(Path(__file__).parent)]
    job = json.load(sys.stdin)
    status = 0
    for repository in job["repositories"]:
        try:
            fetch(repository, job["token"] or None)
        except Refused as refused:
            tell("failed", name=repository["name"], code=refused.code, message=str(refused))
            status = 1
    return status


def tell(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def fetch(repository: dict[str, Any], token: str | None) -> None:
    """One repository, and say how it goes. Raises ``Refused``."""
    try:
        import huggingface_hub as client
        from huggingface_hub import constants
    except ImportError as error:
        raise Refused("NoClient", f"the engine's Python, {sys.executable}, has no huggingface_hub: {error}") from error
    name, revision = repository["name"], repository["revision"] or None
    caches = [Path(each).expanduser() for each in (repository["directory"], constants.HF_HUB_CACHE) if each]
    folders = [cache / f"models--{name.replace('/', '--')}" for cache in caches]
    try:
        token = token or client.get_token()
        info = client.HfApi().model_info(name, revision=revision, files_metadata=True, token=token)
        files = {each.rfilename: (int(each.size or 0), _blob(each)) for each in info.siblings or ()}
        named: list[str] | None = None
        if INDEX in files and chosen(files, repository["weights"], (), None)[0]:
            place = client.hf_hub_download(name, INDEX, revision=revision, token=token, cache_dir=caches[0])
            named = list(json.loads(Path(place).read_text())["weight_map"].values())
        weights, others = chosen(files, repository["weights"], repository["ignore"], named)
        # vLLM looks for a tokenizer in --download-dir, and for all else that is no weights in the hub's own cache.
        parts = [[*weights, *others], others][: len(caches)]
        here = Here(
            [(folder / "blobs", *files[file]) for folder, part in zip(folders, parts, strict=True) for file in part]
        )
        before = here.bytes()
        here.check_room()
        with Report(name, here):
            for cache, part in zip(caches, parts, strict=True):
                if part:  # an empty list of patterns would be: everything
                    patterns = [glob.escape(file) for file in part]
                    client.snapshot_download(
                        name, revision=revision, token=token, cache_dir=cache, allow_patterns=patterns
                    )
    except Exception as error:
        refused = explained(error, name, revision, token, constants.ENDPOINT)
        if refused.code == "NoHub" and (folders[0] / "refs" / (revision or "main")).exists():
            copy = "a copy that an earlier pull or start brought is in the cache"
            raise Refused(refused.code, f"{refused} ({copy})") from error
        raise refused from error
    fetched = max(0, here.total - before)
    tell("pulled", name=name, new=fetched > 0, fetched=fetched, total=here.total)


def _blob(sibling: Any) -> str:
    """The name of a file's contents in the cache."""
    lfs = sibling.lfs
    if lfs is None:
        return str(sibling.blob_id or "")
    return str(lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256)


def chosen(
    files: Iterable[str], load_format: str, ignore: Sequence[str], index: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Of a repository's ``files``: the weights that vLLM would load, and what is no weights.

    ``index``: the files that the repository's own index of weights names, where there is one.
    """
    names = list(files)
    others = [name for name in names if not _matches(name, WEIGHTS)]
    weights = [name for name in names if _matches(name, WEIGHTS)]
    if load_format == "auto":
        load_format = "mistral" if any(_matches(name, FORMATS["mistral"]) for name in names) else "hf"
    if load_format not in FORMATS:  # "*", and loaders that we do not know: all there is
        return weights, others
    found: list[str] = []
    for pattern in FORMATS[load_format]:
        if any(_matches(name, [pattern]) for name in weights):
            found = [name for name in weights if _matches(name, [pattern])]
            if pattern == "*.safetensors" and index:
                found = [name for name in found if name in index]
            break
    modules = [name for name in weights if found and MODULES.fullmatch(name) and name not in found]
    return [name for name in found if not _matches(name, ignore)] + modules, others


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """As the hub's client does it: a ``*`` goes over slashes too."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


class Here:
    """How much of the wanted files is on the disk, whole or in part."""

    def __init__(self, wanted: Sequence[tuple[Path, int, str]]) -> None:
        #: Folder of contents and the contents' name -> size.
        self._sizes = {(folder, blob): size for folder, size, blob in wanted}
        self._folders = sorted({folder for folder, _, _ in wanted})
        self._old = {file for folder in self._folders for file in folder.glob("*.incomplete")}
        self.total = sum(self._sizes.values())

    def bytes(self) -> int:
        """Of parts of an earlier try only those that the client goes on with."""
        return sum(self._bytes().values())

    def _bytes(self) -> dict[tuple[Path, str], int]:
        sizes: dict[tuple[Path, str], int] = {}
        for folder in self._folders:
            for file in self._files(folder):
                blob, part = file.name.split(".")[0], file.name.endswith(".incomplete")
                if (folder, blob) not in self._sizes or (part and file in self._old and _is_nobodys(file)):
                    continue
                try:
                    size = file.stat().st_size
                except OSError:
                    continue  # it was moved to its place
                sizes[folder, blob] = max(sizes.get((folder, blob), 0), size)
        return {key: min(size, self._sizes[key]) for key, size in sizes.items()}

    def check_room(self) -> None:
        """Raises ``OSError`` before the first byte where they cannot all fit."""
        here = self._bytes()
        for folder in self._folders:  # they may be on two disks
            missing = sum(size - here.get(key, 0) for key, size in self._sizes.items() if key[0] == folder)
            place = next(each for each in folder.parents if each.exists())
            free = shutil.disk_usage(place).free
            if missing > free:
                text = f"{missing / 1e9:.1f} GB are missing, and {place} has {free / 1e9:.1f} GB free"
                raise OSError(errno.ENOSPC, text)

    def clear(self) -> None:
        """Take away the parts of files that this process is writing and that no later one can go on with.

        Another pull, or the engine itself, may be writing beside them: the client has its part open until it is whole.
        """
        opened = {os.path.realpath(descriptor) for descriptor in self._files(Path("/proc/self/fd"))}
        for folder in self._folders:
            for file in self._files(folder):
                if _is_nobodys(file) and os.path.realpath(file) in opened:
                    file.unlink(missing_ok=True)

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        try:
            return list(folder.iterdir())
        except OSError:
            return []


def _is_nobodys(file: Path) -> bool:
    """A part under a name that is made up for one process (huggingface_hub 2); an older client goes on with its own."""
    return file.name.endswith(".incomplete") and file.name.count(".") > 1


class Report:
    """Tells how much is here while the block runs; SIGTERM ends the process, cleanly."""

    def __init__(self, name: str, here: Here) -> None:
        self._name, self._here = name, here
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def __enter__(self) -> None:
        signal.signal(signal.SIGTERM, self._end)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _run(self) -> None:
        while True:
            tell("progress", name=self._name, done=self._here.bytes(), total=self._here.total, text="")
            if self._over.wait(TICK):
                return

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._here.clear()
        # Not sys.exit: it would wait for the threads that fetch.
        os._exit(128 + number)


def explained(error: Exception, name: str, revision: str | None, token: str | None, endpoint: str) -> Refused:
    """Why it failed, by what was raised or what that came from. By names: the classes have moved between versions."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    sent = "the token that was sent has no access" if token else "no token was sent (HF_TOKEN in the replica's env)"
    status = next((s for each in chain if (s := _status(each))), 0)
    if "GatedRepoError" in kinds:
        return Refused("Gated", f"{name} is gated: its owners grant access on {endpoint}/{name}, and {sent}")
    if "RevisionNotFoundError" in kinds:
        return Refused("NoRevision", f"{name} has no revision '{revision or 'main'}'")
    if status == 401 and token and "RepositoryNotFoundError" not in kinds:
        return Refused("BadToken", f"{endpoint} does not take the token that was sent")
    if "RepositoryNotFoundError" in kinds:
        return Refused("NoRepository", f"{endpoint} has no {name}, or it is private and {sent}")
    if "HFValidationError" in kinds:
        return Refused("NoRepository", f"'{name}' is no name of a repository: {_line(error)}")
    full = next((each for each in chain if isinstance(each, OSError) and each.errno in _DISK), None)
    if full is not None:
        place = f": {full.filename}" if full.filename else ""
        return Refused(_DISK[full.errno or 0], f"cannot write to the cache: {full.strerror}{place}")
    if status:
        return Refused("HubError", f"{endpoint} answered {status}: {_line(error)}")
    if kinds & {"ConnectError", "ConnectionError", "TransportError", "TimeoutException", "RequestException"}:
        return Refused("NoHub", f"cannot reach {endpoint}: {_line(chain[-1])}")
    return Refused("Failed", f"{type(error).__name__}: {_line(error)}")


_DISK = {
    errno.ENOSPC: "NoSpace",
    errno.EDQUOT: "NoSpace",
    errno.EACCES: "NotWritable",
    errno.EPERM: "NotWritable",
    errno.EROFS: "NotWritable",
    errno.ENOTDIR: "NotWritable",
}


def _status(error: BaseException) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())
