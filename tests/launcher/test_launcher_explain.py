"""Why a replica ended, in the engine's own words."""

import pytest

from supervisord.launcher.explain import explanation, output_of, telling_line


@pytest.mark.parametrize(
    ("result", "code", "status", "expected"),
    [
        ("exit-code", "exited", "1", "engine exited with status 1: OOM"),
        ("exit-code", "", "", "a command that its unit runs before the engine failed: OOM"),
        ("signal", "killed", "KILL", "engine was killed by SIGKILL: OOM"),
        ("core-dump", "dumped", "SEGV", "engine crashed with SIGSEGV: OOM"),
        ("protocol", "exited", "0", "engine exited with status 0 before it was ready: OOM"),
        ("timeout", "killed", "TERM", "engine took too long to start or stop, and was killed by SIGTERM: OOM"),
        ("oom-kill", "killed", "KILL", "engine was killed because the machine ran out of memory: OOM"),
        ("start-limit-hit", "", "", "systemd ended it: start-limit-hit: OOM"),
    ],
)
def test_what_happened(result: str, code: str, status: str, expected: str) -> None:
    env = {"SERVICE_RESULT": result, "EXIT_CODE": code, "EXIT_STATUS": status}
    assert explanation("chat-a", env, ["OOM"]) == f"vllm-replica: chat-a: {expected}"


def test_a_good_end_needs_no_word() -> None:
    env = {"SERVICE_RESULT": "success", "EXIT_CODE": "exited", "EXIT_STATUS": "0"}
    assert explanation("chat-a", env, ["Error: x"]) == ""
    assert explanation("chat-a", {}, []) == ""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ""),
        (["", "  "], ""),
        (["INFO one", "INFO two", ""], "INFO two"),
        (
            [
                "INFO loading",
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                '  File "core.py", line 3, in run',
                '    raise RuntimeError("Engine core initialization failed. "',
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (["vllm serve: error: unrecognized arguments: --x"], "vllm serve: error: unrecognized arguments: --x"),
        (
            ["vllm-replica: chat-a: engine exited with status 1: Error: old", "vllm-replica: cannot find the model: x"],
            "vllm-replica: cannot find the model: x",
        ),
    ],
)
def test_the_line_that_tells_why(lines: list[str], expected: str) -> None:
    assert telling_line(lines) == expected


def test_output_from_a_log_file(tmp_path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 200_000 + b"\none\n\xff two\n")
    assert output_of("u", {"VLLM_REPLICA_LOG": str(tmp_path / "log")}, system=False)[-2:] == ["one", "\ufffd two"]
    assert output_of("u", {"VLLM_REPLICA_LOG": str(tmp_path / "none")}, system=False) == []


def test_explain_tells_systemd_and_the_log(configured, start, manager, tmp_path) -> None:
    (tmp_path / "log").write_text("ValueError: no such quantization\n")
    started = start(
        tmp_path / "there-is-no-configuration",
        "--explain",
        SERVICE_RESULT="exit-code",
        EXIT_CODE="exited",
        EXIT_STATUS="1",
        VLLM_REPLICA_LOG=str(tmp_path / "log"),
    )
    message = manager.until("STATUS")
    manager.until("BARRIER")
    text = "engine exited with status 1: ValueError: no such quantization"
    assert message.fields == {"STATUS": text}
    assert started.end() == (0, f"vllm-replica: chat-a: {text}\n")


def test_explain_of_a_good_end_is_silent(start, manager, tmp_path) -> None:
    assert start(tmp_path / "none", "--explain", SERVICE_RESULT="success").end() == (0, "")
    assert not manager.waiting()
