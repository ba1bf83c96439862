"""The project speaks of itself only, and its long files are looked at."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _tracked(*patterns):
    names = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in names.decode().split("\0") if name]


def test_no_host_of_a_package_registry_and_no_path_of_a_developers_machine():
    home = "/ro" + "ot/[a-z.]"
    forbidden = re.compile(
        "|".join([r"/wor" + "k/(main|shared)", home, "deb" + r"\.debian\.org", "pypi" + r"\.org/simple"])
    )
    for file in _tracked():
        if file.is_file() and file.suffix not in (".png",):
            found = forbidden.search(file.read_text(errors="replace"))
            assert found is None, f"{file.relative_to(ROOT)}: {found}"


def test_no_source_file_has_grown_beyond_one_subject():
    # A benchmark is one script, with its load and its stub engines.
    files = [file for file in _tracked("*.py") if "bench" not in file.parts]
    long = [f"{f.relative_to(ROOT)}: {n}" for f in files if (n := len(f.read_text().splitlines())) > 450]
    assert not long
