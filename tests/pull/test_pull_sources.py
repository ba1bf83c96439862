"""Which repositories an engine asks for, by its configuration."""

from __future__ import annotations

import pytest

from supervisord.cli.pull.sources import sources
from supervisord.core.spec import ServeSpec
from supervisord.pull.job import EVERYTHING, NO_WEIGHTS, Repository


def of(model="org/chat", args=(), here=(), **options):
    serve = ServeSpec(model, options={name.replace("_", "-"): value for name, value in options.items()}, args=args)
    return sources(serve, "/home/u", lambda path: path in here)


def names(found):
    return [(each.name, each.role, each.revision) for each in found.repositories]


def test_model_comes_with_its_revision_format_directory_and_patterns():
    found = of(revision="v2", load_format="Safetensors", download_dir="/w", ignore_patterns=["a/*", "b/*"])
    assert found.repositories == (Repository("org/chat", "model", "v2", "safetensors", "/w", ("a/*", "b/*")),)


def test_arguments_count_like_options_and_the_last_one_wins():
    found = of(revision="v1", args=("--revision", "v2", "--download_dir=/w", "-O3"))
    assert [(each.revision, each.directory) for each in found.repositories] == [("v2", "/w")]


def test_path_is_local_whether_it_is_there_or_not_and_a_name_is_where_a_folder_of_that_name_is():
    assert of("/srv/m").local == ("/srv/m",)
    assert of("~/m").local == ("/home/u/m",)
    assert of("org/chat", here={"/home/u/org/chat"}).local == ("/home/u/org/chat",)
    assert of("org/chat").repositories


def test_store_that_only_the_engine_can_read_is_foreign():
    assert of("s3://bucket/m").foreign == ("s3://bucket/m",)


def test_tokenizer_and_configuration_of_their_own_come_without_weights():
    found = of("/srv/m", tokenizer="org/tok", tokenizer_revision="t1", hf_config_path="org/conf")
    assert [(each.name, each.revision, each.weights) for each in found.repositories] == [
        ("org/tok", "t1", NO_WEIGHTS),
        ("org/conf", "", NO_WEIGHTS),
    ]


def test_tokenizer_of_the_model_itself_is_no_second_repository_unless_its_revision_is_another():
    assert names(of(tokenizer="org/chat")) == [("org/chat", "model", "")]
    assert len(of(tokenizer="org/chat", tokenizer_revision="t1").repositories) == 2


@pytest.mark.parametrize(
    ("options", "args"),
    [
        ({"speculative_config": {"model": "org/draft", "revision": "d1"}}, ()),
        ({}, ("-sc", '{"model": "org/draft", "revision": "d1"}')),
        ({}, ("--speculative-config.model", "org/draft", "--speculative-config.revision=d1")),
        ({"speculative_config": {"revision": "d1"}, "spec_model": "org/draft"}, ()),
    ],
)
def test_draft_model_is_found_however_it_is_given(options, args):
    assert names(of(args=args, **options))[1:] == [("org/draft", "draft model", "d1")]


@pytest.mark.parametrize("config", [{"method": "ngram"}, {"model": "[ngram]"}, "no json"])
def test_speculation_without_a_model_needs_none(config):
    assert len(of(speculative_config=config).repositories) == 1


def test_adapters_are_fetched_whole_and_local_ones_are_not():
    found = of(
        lora_modules=["a=org/lora", {"name": "b", "path": "org/other"}, "c=/srv/lora"],
        args=("--lora-modules", "d=org/third"),
    )
    assert [each.name for each in found.repositories[1:]] == ["org/lora", "org/other", "org/third"]
    assert {each.weights for each in found.repositories[1:]} == {EVERYTHING}
    assert found.local == ("/srv/lora",)


def test_token_of_the_options_is_taken_and_true_means_that_of_the_login():
    assert of(hf_token="hf_x").token == "hf_x"
    assert of(hf_token=True).token == ""
