"""The operator's configuration: file, command line, and error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.deploy import cluster_config
from tandem.deploy.cli import _parser
from tandem.deploy.cluster_config import load_config, settings
from tandem.deploy.configuration_page import PAGE, page
from tandem.runtime.cores import num_cores
from tandem.runtime.errors import ConfigError


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('prefill = 2\ndecode = 3\ndevice = "cpu"\n')
    config = load_config(file, {"decode": 4})
    assert (config.prefill, config.decode, config.engine_settings.device, config.proxies) == (2, 4, "cpu", 1)


def test_elastic_workers_replace_the_others_unless_both_are_given(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("workers = 2\n")
    both = {"prefill": 1, "prefill_tensor_parallel_size": 2, "tensor_parallel_size": 3}
    assert load_config(file, {}).counts == {"prefill": 0, "decode": 0, "any": 2}
    assert load_config(file, {"workers": 0}).counts == {"prefill": 1, "decode": 1, "any": 0}
    mixed = load_config(file, both)
    assert mixed.counts == {"prefill": 1, "decode": 0, "any": 2}
    assert [mixed.num_ranks(role) for role in mixed.counts] == [2, 3, 3]
    assert mixed.num_threads("any") == max(1, num_cores() // 8)
    load_config(None, {"workers": 1, "decode_prefill_threshold": 0, "autoscale": True})


@pytest.mark.parametrize(
    ("content", "flags", "threshold"),
    [
        ("", {}, 0),
        ("", {"workers": 1, "decode": 1}, 0),
        ("", {"decode_prefill_threshold": 100}, 100),
        ("decode_prefill_threshold = 100", {}, 100),
        ("", {"model": "some/model"}, 64),
        ('model = "some/model"', {}, 64),
        ("", {"prefill": 0}, 64),
    ],
)
def test_prompts_of_the_demo_model_are_handed_over_unless_a_threshold_is_given(
    tmp_path: Path, content: str, flags: dict[str, Any], threshold: int
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(content)
    assert load_config(file, flags, serves_demo=True).routing.decode_prefill_threshold == threshold


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("decod = 2", r"cluster\.toml: unknown key decod; did you mean decode\?"),
        ("zzz = 2", r"unknown key zzz; docs/configuration\.md"),
        ("decode = 0", "decode: .* give --decode 1"),
        ("decode = 0\nworkers = 0", "decode: no worker could decode"),
        ("workers = 9\nautoscale = true\nautoscale_max_workers = 8", "8 is too few for the 9 workers"),
        ('port = "x"', r"cluster\.toml: port = 'x': expected `int`"),
        ('kv_connector = "pigeon"', "kv_connector"),
        ("= broken", "TOML"),
        ('cluster_host = "10.0.0.1"', r"tandem keys FOLDER.*--insecure-network"),
        ('cluster_host = "0.0.0.0"\ninsecure_network = true', "cluster_host"),
        ('cluster_host = "10.0.0.1"\nnetwork_keys = "/nonexistent"', "tandem keys /nonexistent"),
        ('join = "tcp://10.0.0.1:7777"', "--cluster-host"),
        ('join = "10.0.0.1:7777"\ncluster_host = "10.0.0.2"\ninsecure_network = true', "tcp://HOST:PORT"),
        ("port = 9000\nadmin_port = 9000", "admin_port"),
        ("prefill = 0\ndecode_prefill_threshold = 0", "prefill.*--decode-prefill-threshold"),
        ("prefill = 0\nautoscale = true", "autoscale.*--prefill"),
        ('kv_disk_dir = "/blocks"', "kv_disk_dir: give the maximum size of /blocks in GiB as --kv-disk-gib"),
        ("kv_disk_gib = 2.5", r"kv_disk_gib: give the folder that may hold 2\.5 GiB as --kv-disk-dir"),
        ('kv_store = "10.0.0.1:50051"', "kv_store: '10.0.0.1:50051' .* mooncake://HOST:PORT"),
        ('kv_store = "mooncake://10.0.0.1"', "kv_store: .* mooncake://HOST:PORT"),
        ('kv_store = "mooncake://10.0.0.1:70000"', "kv_store: .* mooncake://HOST:PORT"),
        ('kv_store = "mooncake://user@store:50051/x"', "kv_store: .* mooncake://HOST:PORT"),
        ('engine_python = "/usr/bin/python3"', "engine_python: .* --engine vllm"),
        ('engine = "sglang"', "engine = 'sglang'"),
        ('engine = "vllm"\nkv_host_gib = 2', "kv_host_gib: 2 cannot be used with --engine vllm: .* no tiers"),
        ('engine = "vllm"\nkv_store = "mooncake://a:1"', "kv_store: .* --engine vllm"),
        ('engine = "vllm"\nkv_cache_dtype = "fp8"', "kv_cache_dtype: fp8 .* --engine vllm"),
        ('engine = "vllm"\nquantization = "int8"', "quantization: int8 .* --engine vllm: vLLM quantises to fp8"),
        ('engine = "vllm"\nkv_connector = "gloo"', "kv_connector: gloo .* --engine vllm: .* ipc, tcp or nixl"),
        ('engine = "vllm"\nworkers = 1\ndecode_tensor_parallel_size = 2', "decode_tensor_parallel_size: 2"),
    ],
)
def test_config_errors_name_the_mistake(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_config(file, {})


def test_workers_with_vllms_engine_take_what_has_a_meaning_there(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('engine = "vllm"\nengine_python = "/envs/vllm/bin/python"\nkv_host_gib = 0\nquantization = "fp8"')
    config = load_config(file, {"workers": 2, "tensor_parallel_size": 2, "kv_connector": "tcp"})
    assert (config.engine, config.engine_python) == ("vllm", "/envs/vllm/bin/python")
    assert load_config(file, {"engine": "tandem", "engine_python": ""}).engine == "tandem"
    for command in (["up"], ["worker", "any", "--join", "tcp://a:1"]):
        assert _parser().parse_args([*command, "--engine", "vllm"]).engine == "vllm"


def test_a_store_is_named_by_host_and_port() -> None:
    for store in ("mooncake://10.0.0.1:50051", "mooncake://kv-store.local:1"):
        assert load_config(None, {"kv_store": store}).tiers.kv_store == store


def test_settings_have_names_that_differ_and_descriptions_and_groups_are_not_interleaved() -> None:
    keys = [setting.key for setting in settings()]
    assert len(keys) == len(set(keys)) == 80
    assert all(setting.description.endswith(".") for setting in settings())
    groups = [setting.group for setting in settings()]
    firsts = list(dict.fromkeys(groups))
    assert groups == sorted(groups, key=firsts.index) and len(firsts) == 9
    arguments = _parser().parse_args(
        ["up", "--model", "m", "--prefill", "2", "--kv-cache-gib", "0.5", "--trust-remote-code"]
    )
    assert (arguments.model, arguments.prefill, arguments.kv_cache_gib, arguments.trust_remote_code) == (
        "m",
        2,
        0.5,
        True,
    )
    assert "decode" not in arguments, "flags that were not given must not override the file"


def test_clients_with_keys_of_their_own_do_not_go_before_others() -> None:
    assert load_config(None, {"api_keys_file": "keys"}).soonest_priority == 0
    assert load_config(None, {"api_key": "one for all"}).soonest_priority == -100


def test_tandem_up_takes_at_most_78_flags() -> None:
    assert len(_parser().parse_args(["up"]).known_flags) <= 78


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--prefil", "2"], r"unknown flag --prefil; did you mean --prefill\?"),
        (["up", "--join", "tcp://a:1"], "`tandem worker"),
        (["worker", "decode", "--prefill", "2"], "--count N"),
        (["worker", "any", "--workers", "2"], "--count N"),
        (["role", "decode-0", "both"], "invalid choice: 'both' .*prefill.*decode.*any"),
        (["up", "--port", "x"], "--port.*tandem up --help"),
        (["up", "extra"], "unexpected argument 'extra'"),
        (["sing"], "sing"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        _parser().parse_args(arguments)
    assert "\n" not in refused.value.message


def test_the_configuration_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `python -m tandem.deploy.configuration_page`"


@pytest.mark.parametrize(
    ("num_cores", "threads", "tokenizers", "media"), [(1, 1, 2, 1), (8, 4, 2, 1), (64, 32, 4, 8), (512, 256, 16, 64)]
)
def test_threads_and_processes_follow_the_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, threads: int, tokenizers: int, media: int
) -> None:
    monkeypatch.setattr(cluster_config, "num_cores", lambda: num_cores)
    config = load_config(None, {})
    assert [config.num_threads("prefill"), config.num_threads("decode")] == [threads, threads]
    assert (config.reader_processes, config.media_sandboxes) == (tokenizers, media)


def test_paths_in_the_home_are_those_of_the_user_who_starts_the_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes get another home where this one cannot be written to."""
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "cluster.toml"
    file.write_text('data_dir = "~/batches"\nlora = ["a=~/adapters/a", "b=/adapters/~b"]\n')
    config = load_config(file, {"model": "~/model", "kv_disk_dir": "~/kv", "kv_disk_gib": 1.0})
    assert (config.engine_settings.model, config.data_dir) == ("/home/me/model", "/home/me/batches")
    assert (config.tiers.kv_disk_dir, config.lora) == ("/home/me/kv", ["a=/home/me/adapters/a", "b=/adapters/~b"])
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError))
    with pytest.raises(ConfigError, match="~/model: no home folder is known for this user; write the whole path"):
        load_config(None, {"model": "~/model"})


@pytest.mark.parametrize("name", ["a/b", "../x", "a b", "x" * 101, "a\n"])
def test_names_of_workers_are_those_of_files(name: str) -> None:
    with pytest.raises(ConfigError, match="may have letters, digits"):
        load_config(None, {"name": name})
    assert load_config(None, {"name": "host-1.rack_2"}).name == "host-1.rack_2"
