"""The command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisord.simulator.options import GIB, ModelNotFound, human_int, parse


def test_a_real_command_line_is_accepted() -> None:
    options = parse(
        [
            "org/model", "--served-model-name", "a", "b", "--host", "127.0.0.1", "--port", "7771",
            "--max-model-len", "112K",
            "--max_num_seqs", "16", "--dtype", "bfloat16", "-tp", "2", "--kv-cache-dtype=fp8", "--enforce-eager",
            "--no-enable-prefix-caching", "--compilation-config.level", "3", "-O2", "--gpu-memory-utilization", "0.5",
            "--speculative-config", '{"a": 1}', "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        ],
        {},
    )  # fmt: skip
    assert options.served_names == ("a", "b")
    assert (options.max_model_len, options.max_num_seqs, options.prefix_caching) == (114_688, 16, False)
    assert not options.dev_mode


def test_an_explicit_zero_is_not_an_omitted_option() -> None:
    assert parse(["m", "--sim-weights", "0"], {}).memory.weights == 0
    assert parse(["m"], {}).memory.weights > GIB


def test_the_model_may_come_after_the_options() -> None:
    assert parse(["--dtype", "auto", "--seed", "0", "m"], {}).model == "m"


def test_unknown_options_exit_2_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["m", "--enable-slep-mode"], {})
    assert caught.value.code == 2
    assert "unrecognized arguments: --enable-slep-mode" in capsys.readouterr().err


def test_unknown_faults_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["m", "--sim-fault", "explode"], {})
    assert "unknown fault 'explode'" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model"])
def test_a_model_path_that_is_not_there_is_an_error(model: str) -> None:
    with pytest.raises(ModelNotFound):
        parse([model], {})


def test_the_context_length_comes_from_the_models_own_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    assert parse([str(tmp_path)], {}).max_model_len == 4096
    assert parse([str(tmp_path), "--max-model-len", "512"], {}).max_model_len == 512


def test_dev_mode_and_api_key_come_from_the_environment() -> None:
    options = parse(["m"], {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "secret"})
    assert options.dev_mode
    assert options.api_keys == ("secret",)


@pytest.mark.parametrize(("text", "number"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("-1", -1)])
def test_human_numbers(text: str, number: int) -> None:
    assert human_int(text) == number


def test_memory_is_split_so_that_the_parts_are_what_is_in_use() -> None:
    memory = parse(["m", "--sim-gpu-memory", "40G", "--sim-weights", "10G"], {}).memory
    assert memory.weights == 10 * GIB
    assert memory.weights + memory.kv_cache + memory.other == 36 * GIB
