"""``packaging/install`` and ``uninstall`` in a home of their own, with an interpreter that only pretends to install.

The real interpreter, pip and compiler are used on the booted machine (tests/machine).
"""

import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGING = Path(__file__).parents[2] / "packaging"
#: What `python -m venv DIR` and then `DIR/bin/python -m pip install` leave, without doing it.
PRETENDER = """#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip install "*)
  [ -z "$PIP_FAILS" ] || exit 1
  for name in vllmctl vllm-supervisord vllm-replica vllm-simulator; do
    echo "#!/bin/sh" >"$(dirname "$0")/$name"; chmod +x "$(dirname "$0")/$name"
  done ;;
esac
"""


@dataclass
class Home:
    """A home folder, and the two programs run in it."""

    path: Path
    python: Path

    def run(self, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(self.path), "PATH": os.environ["PATH"], "PYTHON": str(self.python)}
        # No manager and no bus of whoever runs the tests.
        env |= {"XDG_RUNTIME_DIR": str(self.path / "no"), "DBUS_SESSION_BUS_ADDRESS": "unix:path=/nonexistent"}
        command = [PACKAGING / program]
        return subprocess.run(command, env=env | variables, capture_output=True, text=True, check=False)

    def install(self, **variables: str) -> str:
        done = self.run("install", **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def files(self) -> dict[str, str]:
        """Every file and link below the home, with its content or target."""
        found = sorted(path for path in self.path.rglob("*") if path.is_symlink() or path.is_file())
        return {
            str(path.relative_to(self.path)): str(path.readlink()) if path.is_symlink() else path.read_text()
            for path in found
        }


@pytest.fixture
def home(tmp_path: Path) -> Home:
    python = tmp_path / "python"
    python.write_text(PRETENDER)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    path = tmp_path / "a home"
    path.mkdir()
    (path / ".profile").write_text("mine\n")
    return Home(path, python)


SHARE = ".local/share"


def test_puts_everything_where_the_user_manager_the_bus_and_the_shell_look(home: Home) -> None:
    text = home.install(LISTEN="127.0.0.1:8123")
    assert "systemctl --user enable --now vllm-supervisord.socket vllm-supervisord.service" in text
    files = home.files()
    for name in ("vllm-supervisord.service", "vllm-supervisord.socket", "vllm@.service", "vllm.slice"):
        assert "@BINDIR@" not in files[f"{SHARE}/systemd/user/{name}"]
    assert "ListenStream=127.0.0.1:8123" in files[f"{SHARE}/systemd/user/vllm-supervisord.socket"]
    assert f"{SHARE}/dbus-1/services/io.github.vllmctl1.service" in files
    assert f"{SHARE}/dbus-1/interfaces/io.github.vllmctl1.Manager.xml" in files
    for program in ("vllmctl", "vllm-supervisord", "vllm-replica"):
        assert os.access(home.path / ".local/bin" / program, os.X_OK)
    started = home.path / SHARE / "vllm-supervisord/venv/bin/vllm-supervisord"
    assert f'ExecStart="{started}"' in files[f"{SHARE}/systemd/user/vllm-supervisord.service"]
    assert started.exists()


def test_uninstalling_takes_away_exactly_that(home: Home) -> None:
    before = home.files()
    home.install()
    (home.path / SHARE / "systemd/user/mine.service").write_text("mine\n")
    wants = home.path / ".config/systemd/user/default.target.wants"
    wants.mkdir(parents=True)
    (wants / "mine.service").symlink_to(home.path / SHARE / "systemd/user/mine.service")
    (wants / "vllm-supervisord.service").symlink_to(home.path / SHARE / "systemd/user/vllm-supervisord.service")
    done = home.run("uninstall")
    assert done.returncode == 0, done.stderr
    left = set(home.files()) - set(before)
    assert left == {
        f"{SHARE}/systemd/user/mine.service",
        ".config/systemd/user/default.target.wants/mine.service",
        ".config/vllm-supervisord/config.toml",
    }
    assert ".config/vllm-supervisord" in done.stdout
    assert not (home.path / ".local/bin").exists()


def test_purging_takes_configuration_and_state_too(home: Home) -> None:
    before = home.files()
    home.install()
    state = home.path / ".local/state/vllm-supervisord/replicas"
    state.mkdir(parents=True)
    (state / "a.json").write_text("{}")
    assert home.run("uninstall", PURGE="1").returncode == 0
    assert home.files() == before


def test_installing_again_changes_nothing_and_keeps_the_configuration(home: Home) -> None:
    home.install()
    config = home.path / ".config/vllm-supervisord/config.toml"
    config.write_text("# mine\n")
    before = home.files()
    home.install()
    after = home.files()
    assert config.read_text() == "# mine\n"
    assert {name for name in before if "venv-" not in name} == {name for name in after if "venv-" not in name}


def test_the_first_configuration_is_valid_and_so_is_the_example_in_it(home: Home, tmp_path: Path) -> None:
    home.install()
    config = home.path / ".config/vllm-supervisord/config.toml"
    check = [sys.executable, "-m", "supervisord.cli.main", "config", "check", "--config"]
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(PACKAGING.parent)}
    done = subprocess.run([*check, config], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failing_pip_changes_nothing(home: Home) -> None:
    home.install()
    before = home.files()
    done = home.run("install", PIP_FAILS="1")
    assert done.returncode == 1
    assert "cannot install: pip failed; nothing was changed" in done.stderr
    assert home.files() == before


def test_a_file_of_somebody_else_is_never_overwritten(home: Home) -> None:
    mine = home.path / ".local/bin/vllmctl"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine\n")
    done = home.run("install")
    assert done.returncode == 1
    assert f"{mine} is there already" in done.stderr
    assert mine.read_text() == "mine\n"
    assert not (home.path / SHARE / "systemd").exists()
    home.run("uninstall")
    assert set(home.files()) == {".profile", ".local/bin/vllmctl"}


def test_what_a_newer_version_no_longer_has_goes_with_the_upgrade(home: Home) -> None:
    home.install()
    stale = home.path / SHARE / "systemd/user/vllm-old.service"
    stale.write_text("old\n")
    manifest = home.path / SHARE / "vllm-supervisord/manifest"
    manifest.write_text(manifest.read_text() + f"file {stale}\n")
    home.install()
    assert not stale.exists()
    assert str(stale) not in manifest.read_text()


def test_an_upgrade_leaves_the_environment_in_which_something_runs(home: Home) -> None:
    home.install()
    first = home.path / SHARE / "vllm-supervisord/venv-1"
    with subprocess.Popen([first / "bin/python", "600"], executable="/bin/sleep") as running:
        home.install()
        assert first.exists()
        running.kill()
    home.install()
    assert not first.exists()
    assert (home.path / SHARE / "vllm-supervisord/venv/bin/vllmctl").exists()


def test_sudo_is_refused_because_it_would_install_for_root(home: Home) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be mistaken for sudo")
    done = home.run("install", SUDO_USER="somebody")
    assert done.returncode == 1
    assert "run it as somebody, without sudo" in done.stderr
    assert set(home.files()) == {".profile"}


def test_uninstalling_what_is_not_installed_says_so(home: Home) -> None:
    done = home.run("uninstall")
    assert done.returncode == 0
    assert "Nothing is installed here" in done.stdout
