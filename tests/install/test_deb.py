"""``packaging/deb/build``, with a pip that only pretends to install.

The real pip, compiler, dpkg and systemd are used on the booted machine (tests/machine/test_package.py).
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGING = Path(__file__).parents[2] / "packaging"
pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="this is not Debian")
#: An interpreter whose environments have a pip that leaves what pip would, without doing it.
PRETENDER = """#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip "*" wheel "*) [ -z "$PIP_FAILS" ] ;;
"-m pip "*" install "*)
  python=$5 bin=$(dirname "$5")
  packages=$(echo "${bin%/bin}"/lib/python3.*/site-packages)
  for name in vllmctl vllm-supervisord vllm-replica vllm-simulator; do
    echo "#!$python" >"$bin/$name"; chmod +x "$bin/$name"
  done
  mkdir -p "$packages/theirs-1.2.dist-info" "$packages/supervisord"
  printf 'Name: theirs\\nVersion: 1.2\\nLicense: MIT\\n' >"$packages/theirs-1.2.dist-info/METADATA"
  echo "$python" >"$packages/theirs-1.2.dist-info/direct_url.json"
  [ -z "$LEAKS" ] || echo "$python" >"$packages/theirs.pth" ;;
*) exec /usr/bin/python3 "$@" ;;
esac
"""
#: Where Debian's systemd, D-Bus, man and shells look.
WHERE = [
    "/usr/lib/systemd/user/vllm-supervisord.service",
    "/usr/lib/systemd/user/vllm-supervisord.socket",
    "/usr/lib/systemd/user/vllm@.service",
    "/usr/lib/systemd/user/vllm.slice",
    "/usr/share/bash-completion/completions/vllmctl",
    "/usr/share/dbus-1/interfaces/io.github.vllmctl1.Manager.xml",
    "/usr/share/dbus-1/services/io.github.vllmctl1.service",
    "/usr/share/dbus-1/system.d/io.github.vllmctl1.conf",
    "/usr/share/doc/vllm-supervisord/changelog.gz",
    "/usr/share/doc/vllm-supervisord/config.first.toml",
    "/usr/share/doc/vllm-supervisord/copyright",
    "/usr/share/fish/vendor_completions.d/vllmctl.fish",
    "/usr/share/man/man1/vllmctl.1.gz",
    "/usr/share/zsh/vendor-completions/_vllmctl",
]


@dataclass
class Builder:
    """The build in a copy of the checkout, which is no git checkout."""

    source: Path
    env: dict[str, str]

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [self.source / "packaging" / "deb" / "build"]
        return subprocess.run(command, env=self.env | variables, capture_output=True, text=True, check=False)

    def build(self, **variables: str) -> Path:
        done = self.run(**variables)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())


def make(folder: Path) -> Builder:
    python = folder / "python"
    python.write_text(PRETENDER)
    python.chmod(0o755)
    source = folder / "a checkout"
    for name in ("packaging", "units", "docs", "supervisord", "proxy"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGING.parent / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(PACKAGING.parent / name, source / name)
    # Everything is there, for the builder; what is not is another test's.
    (source / "packaging" / "system-packages").write_text('#!/bin/sh\n[ "$1" = --ask ] || echo dbus-user-session\n')
    tmp = folder / "tmp"
    tmp.mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(python),
        "TMPDIR": str(tmp),
        "GIT_CEILING_DIRECTORIES": str(folder),
    }
    return Builder(source, env | {"SOURCE_DATE_EPOCH": "1700000000", "DEBEMAIL": "ada@example.org"})


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return make(tmp_path)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a checkout in which everybody may write."""
    builder = make(tmp_path_factory.mktemp("package"))
    for name in ("README.md", "packaging/config.first.toml"):
        (builder.source / name).chmod(0o666)
    return builder.build()


def contents(package: Path) -> dict[str, str]:
    """Path below the root -> permissions, owner and link of each file."""
    text = subprocess.check_output(["dpkg-deb", "--contents", package], text=True)
    rows = [line.split(maxsplit=5) for line in text.splitlines()]
    return {row[5].partition(" -> ")[0][1:]: f"{row[0]} {row[1]} {row[5].partition(' -> ')[2]}".strip() for row in rows}


def field(package: Path, name: str) -> str:
    return subprocess.check_output(["dpkg-deb", "--field", package, name], text=True).strip()


def test_everything_that_make_install_puts_anywhere_is_where_debian_looks_for_it(package: Path, tmp_path: Path) -> None:
    found = contents(package)
    assert [name for name in WHERE if name not in found] == []
    subprocess.run([PACKAGING / "stage", "files", tmp_path / "data", "/bin", "1", "/own"], check=True)
    names = {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()} - {"LICENSE", "vllmctl.1"}
    assert names - {Path(name).name for name in found} == set()
    programs = subprocess.check_output([PACKAGING / "stage", "programs"], text=True).split()
    assert "vllmctl" in programs
    assert all(found[f"/usr/bin/{name}"].endswith(f"../lib/vllm-supervisord/venv/bin/{name}") for name in programs)


def test_every_file_is_roots_and_none_can_be_written_by_others(package: Path) -> None:
    rows = [row.split() for row in contents(package).values()]
    assert {row[0] for row in rows} == {"drwxr-xr-x", "-rw-r--r--", "-rwxr-xr-x", "lrwxrwxrwx"}
    assert {row[1] for row in rows} == {"root/root"}


def test_one_commit_is_one_file(builder: Builder, tmp_path: Path) -> None:
    first = builder.build(TZ="Asia/Tokyo").read_bytes()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert builder.build(TMPDIR=str(elsewhere), TZ="UTC", LANG="C.UTF-8").read_bytes() == first


def test_a_later_commit_is_a_newer_version(builder: Builder) -> None:
    old, new = (field(builder.build(SOURCE_DATE_EPOCH=when), "Version") for when in ("1700000000", "1700000001"))
    assert old.startswith("0.1.0+20231114.221320~")
    assert subprocess.run(["dpkg", "--compare-versions", old, "lt", new], check=False).returncode == 0


def test_programs_are_started_by_the_installed_interpreter(package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path / "root"], check=True)
    own = tmp_path / "root/usr/lib/vllm-supervisord"
    venv = f"/usr/lib/vllm-supervisord/venv-{field(package, 'Version')}"
    assert (own / "venv/bin/vllmctl").read_text().splitlines()[0] == f"#!{venv}/bin/python"
    assert not list(own.rglob("direct_url.json"))


def test_a_package_that_names_the_folder_of_the_build_is_none(builder: Builder) -> None:
    done = builder.run(LEAKS="1")
    assert done.returncode == 1
    assert re.search(r"/theirs\.pth\ncannot build a package: these files name the folder of the build\n$", done.stderr)


def test_is_set_up_where_there_is_no_shared_memory(tmp_path: Path) -> None:
    """As in the plain chroot in which somebody makes an image."""
    packages = tmp_path / "1.0" / "lib" / "ours"
    packages.mkdir(parents=True)
    (packages / "ours.py").write_text("here = True\n")
    (tmp_path / "1.0" / "bin").mkdir()
    (tmp_path / "1.0" / "bin" / "python").symlink_to("/usr/bin/python3")
    (tmp_path / "venv-1.0").symlink_to("1.0")
    text = (PACKAGING / "deb" / "postinst").read_text().replace("@VERSION@", "1.0")
    script = tmp_path / "postinst"
    script.write_text(text.replace("/usr/lib/vllm-supervisord", str(tmp_path)).replace("/run/systemd", "/nowhere"))
    bare = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && "
    command = ["unshare", "--mount", "sh", "-c", bare + f'exec sh "{script}" configure']
    if os.geteuid() != 0:  # then with it
        command = ["sh", str(script), "configure"]
    subprocess.run(command, check=True)
    assert list((packages / "__pycache__").glob("ours.*.pyc"))


def test_the_copyright_file_names_the_licences_of_others(package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path / "root"], check=True)
    text = (tmp_path / "root/usr/share/doc/vllm-supervisord/copyright").read_text()
    assert "License: Apache-2.0" in text
    assert "theirs-1.2.dist-info: MIT" in text


def test_a_build_that_fails_leaves_no_package(builder: Builder) -> None:
    done = builder.run(PIP_FAILS="1")
    assert done.returncode == 1
    assert "cannot build a package: pip failed" in done.stderr
    assert not (builder.source / "dist").exists()
    assert not list(Path(builder.env["TMPDIR"]).iterdir())


@pytest.mark.parametrize("missing", ["SOURCE_DATE_EPOCH", "DEBEMAIL"])
def test_without_git_when_and_whose_it_is_must_be_said(builder: Builder, missing: str) -> None:
    del builder.env[missing]
    done = builder.run()
    assert done.returncode == 1
    assert re.search(rf"cannot build a package: without git, say .*{missing}", done.stderr)


def test_missing_packages_are_named(builder: Builder, tmp_path: Path) -> None:
    shutil.copy2(PACKAGING / "system-packages", builder.source / "packaging" / "system-packages")
    query = tmp_path / "bin" / "dpkg-query"
    query.parent.mkdir()
    query.write_text("#!/bin/sh\necho installed dpkg\n")
    query.chmod(0o755)
    done = builder.run(PATH=f"{query.parent}:{builder.env['PATH']}")
    assert done.returncode == 1
    assert "Missing system packages" in done.stderr
    assert {"gcc", "python3-venv", "libsystemd-dev"} <= set(done.stderr.split())


def test_without_dpkg_it_says_so(builder: Builder, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dirname").symlink_to("/usr/bin/dirname")
    done = builder.run(PATH=str(tmp_path / "bin"))
    assert done.returncode == 1
    assert done.stderr == "cannot build a package: there is no dpkg-deb (the package dpkg of Debian)\n"


def test_the_packages_of_libraries_are_those_that_debian_itself_found() -> None:
    """Of its interpreter, which is linked with a few."""
    program = Path("/usr/bin/python3").resolve()
    triplet = subprocess.check_output(["gcc", "-print-multiarch"], text=True).strip()
    command = [PACKAGING / "deb" / "library-packages", triplet, program]
    ours = set(subprocess.check_output(command, text=True).splitlines())
    query = ["dpkg-query", "--show", "--showformat=${Depends}, ${Pre-Depends}", f"{program.name}-minimal"]
    debians = set(subprocess.check_output(query, text=True).split(", "))
    assert {each.split()[0] for each in ours} <= {each.split()[0] for each in debians}
    assert [each for each in ours if each.startswith("libc6 ")] == [
        each for each in debians if each.startswith("libc6 ")
    ]
