"""Which image a Quadlet runs, and how it is fetched."""

from __future__ import annotations

import pytest

from supervisord.cli.pull.quadlet import image_of, image_of_pull, images_of


def test_images_are_read_as_systemd_reads_files():
    assert images_of(
        ["[Container]\n#Image=x\nImage = a:1 \nExec=serve Image=z\n", "Image=\\\n  b:2\n"],
    ) == ["a:1", "b:2"]


def test_image_is_the_word_that_a_file_names_and_its_store_and_access_are_the_units():
    command = ("podman", "--root", "/s", "run", "--name", "a:1", "--authfile", "/a", "-d", "r/v:2", "--arch", "x")
    image = image_of(command, ["r/v:1", "r/v:2"])
    assert image is not None
    assert image.command == ("podman", "--root", "/s", "pull", "--authfile", "/a", "r/v:2")
    assert image.inspect == ("podman", "--root", "/s", "image", "inspect", "--format", "{{.Id}}", "r/v:2")


def test_image_is_told_from_a_container_that_is_called_the_same():
    image = image_of(("podman", "run", "--name", "vllm", "--tls-verify=false", "vllm", "serve"), ["vllm"])
    assert image is not None
    assert image.command == ("podman", "pull", "--tls-verify=false", "vllm")
    assert image_of(("podman", "--root", "vllm", "run", "other"), ["vllm"]) is None


@pytest.mark.parametrize("names", [[], ["r/v:%i"], ["r/v:1"]])
def test_image_that_the_command_does_not_have_is_not_guessed(names):
    assert image_of(("podman", "run", "r/v:2"), names) is None


def test_image_units_own_command_is_the_pull():
    image = image_of_pull(("podman", "image", "pull", "--tls-verify=false", "r/v:2"))
    assert image is not None
    assert image.command == ("podman", "image", "pull", "--tls-verify=false", "r/v:2")
    assert image.inspect == ("podman", "image", "inspect", "--format", "{{.Id}}", "r/v:2")
