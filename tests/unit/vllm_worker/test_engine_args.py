"""Arguments of vLLM's engine that Tandem decides are refused by name; the others go to vLLM as they are."""

from __future__ import annotations

import pytest

from tandem.deploy.cluster_config import load_config
from tandem.runtime.errors import ConfigError
from tandem.vllm_worker.engine_args import FLAGS, OWNED, check_engine_args, split_argument


def test_names_are_those_of_vllms_command_line_or_code() -> None:
    for spelling in ("hf_overrides", "hf-overrides", "--hf-overrides"):
        assert split_argument(f"{spelling}=a=b") == ("hf_overrides", "", "a=b")
    assert split_argument("compilation-config.pass_config.x=1") == ("compilation_config", ".pass_config.x", "1")
    for wrong in ("hf_overrides", "=1", ""):
        with pytest.raises(ConfigError, match="is not NAME=VALUE"):
            split_argument(wrong)


def test_what_tandem_decides_is_refused_with_the_flag_or_the_reason() -> None:
    assert not FLAGS.keys() & OWNED.keys()
    for name, flag in FLAGS.items():
        with pytest.raises(ConfigError, match=f"engine_arg: {name} is a setting of Tandem: use {flag}"):
            check_engine_args([f"{name.replace('_', '-')}=1"])
    for name, reason in OWNED.items():
        with pytest.raises(ConfigError) as refused:
            check_engine_args(["watermark=0.1", f"{name}.key=1"])
        assert refused.value.message == f"engine_arg: {name} cannot be given: {reason}"


def test_one_argument_is_given_once_but_several_keys_of_it_are_not() -> None:
    check_engine_args(["watermark=0.1", "compilation_config.mode=0", "compilation_config.backend=eager"])
    with pytest.raises(ConfigError, match="watermark is given twice"):
        check_engine_args(["watermark=0.1", "--watermark=0.2"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_arg": ["watermark=0.1"]}, "engine_arg: only workers with vLLM's engine take it"),
        ({"speculative_config": "{}"}, "speculative_config: only workers with vLLM's engine take it"),
        ({"engine": "vllm", "engine_arg": ["pipeline_parallel_size=2"]}, "pipeline_parallel_size cannot be given: KV"),
        ({"engine": "vllm", "speculative_config": "ngram"}, "speculative_config: 'ngram' is not an object in JSON"),
        ({"engine": "vllm", "speculative_config": "[]"}, "speculative_config: '[]' is not an object in JSON"),
    ],
)
def test_the_launcher_refuses_them_before_it_starts_anything(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_config(None, settings)


def test_they_reach_the_launchers_configuration() -> None:
    given = {"engine": "vllm", "engine_arg": ["watermark=0.1"], "speculative_config": '{"method": "ngram"}'}
    config = load_config(None, given)
    assert (config.engine_arg, config.speculative_config) == (["watermark=0.1"], '{"method": "ngram"}')
