"""What each restriction of our units really does to a process of a user unit.

Only the standard library: it also runs on a bare machine. ``hardening.py UNIT-FILE ...`` asks the user manager to run
this file once without and once with each restricting line, and prints one JSON object: {line: [without, with]}, true
where the process was restricted.
"""

import ctypes
import errno
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
#: x86-64 and aarch64 (include/uapi/asm-generic/unistd.h) number them differently.
_PTRACE, _PERSONALITY, _UNSHARE = (101, 135, 272) if os.uname().machine == "x86_64" else (117, 92, 97)
_ADDR_NO_RANDOMIZE, _CLONE_NEWUSER = 0x0040000, 0x10000000


def _system_call(*words: int) -> None:
    if _LIBC.syscall(*(ctypes.c_long(word) for word in words)) < 0:
        raise OSError(ctypes.get_errno(), "")


def _set_user_id_bit() -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).chmod(0o4755)


def _old_system_call() -> None:
    """getpid through int 0x80, the 32-bit entry: killed where only native calls are allowed."""
    if os.uname().machine != "x86_64":
        raise OSError(errno.EPERM, "")
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("b814000000cd80c3"))
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()


def _refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return True
    return False


def _status(field: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


#: For the key of each restricting line: is this process restricted?
PROBES: dict[str, Callable[[], bool]] = {
    "NoNewPrivileges": lambda: _status("NoNewPrivs") == "1",
    "LockPersonality": lambda: _refused(lambda: _system_call(_PERSONALITY, _ADDR_NO_RANDOMIZE)),
    "RestrictRealtime": lambda: _refused(lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))),
    "RestrictNamespaces": lambda: _refused(lambda: _system_call(_UNSHARE, _CLONE_NEWUSER)),
    "RestrictSUIDSGID": lambda: _refused(_set_user_id_bit),
    "RestrictAddressFamilies": lambda: _refused(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()),
    "SystemCallFilter": lambda: _refused(lambda: _system_call(_PTRACE, 0)),
    "SystemCallArchitectures": lambda: _refused(_old_system_call),
    "UMask": lambda: os.umask(0) == 0o077,
    "OOMScoreAdjust": lambda: int(Path("/proc/self/oom_score_adj").read_text()) in (100, 500),
    "LimitCORE": lambda: resource.getrlimit(resource.RLIMIT_CORE)[0] == 0,
    # "Restricted" to more than the usual 1024; the hard limit of the machine may be below what we ask.
    "LimitNOFILE": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024,
}
#: What a key needs beside it to be seen: the filter kills where no error number is set.
_TOGETHER = {"SystemCallFilter": "SystemCallErrorNumber=EPERM"}


def restrictions(unit_file: Path) -> list[str]:
    """The lines of [Service] that this file knows to probe."""
    return [line for line in unit_file.read_text().splitlines() if line.partition("=")[0] in PROBES]


def measure(line: str) -> tuple[bool, bool]:
    """Is a process restricted without the line, and with it?"""
    key = line.partition("=")[0]
    properties = [line, *([_TOGETHER[key]] if key in _TOGETHER else [])]
    return _run(key, []), _run(key, properties)


def _run(key: str, properties: list[str]) -> bool:
    """Restricted, that is: refused, or killed for trying."""
    command = ["systemd-run", "--user", "--quiet", "--wait", "--collect"]
    command += [f"--property={text}" for text in properties]
    done = subprocess.run([*command, sys.executable, __file__, "--probe", key], check=False, capture_output=True)
    return done.returncode != 0


def main() -> int:
    if sys.argv[1] == "--probe":
        return int(PROBES[sys.argv[2]]())
    lines = sorted({line for name in sys.argv[1:] for line in restrictions(Path(name))})
    json.dump({line: measure(line) for line in lines}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
