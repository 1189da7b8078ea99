"""An error of loading stops the cluster only if another try would fail in the same way."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.runtime.errors import ConfigError, InternalError
from tandem.runtime.processes.process import EXIT_BAD_CONFIG, EXIT_FAILED, exit_code_of
from tandem.vllm_worker.engine.load_errors import is_certain, load_error


class ValidationError(ValueError):
    """As pydantic's."""

    def __init__(self, *details: dict[str, Any]) -> None:
        super().__init__("1 validation error for ModelConfig\n  Value error, ...")
        self._details = list(details)

    def errors(self) -> list[dict[str, Any]]:
        return self._details


class OutOfMemoryError(RuntimeError):
    """As torch's."""


class RepositoryNotFoundError(OSError):
    """As the hub's."""


class LocalEntryNotFoundError(FileNotFoundError, ValueError):
    """As the hub's where the network is away, in some versions."""


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Model architectures ['NoSuchForCausalLM'] are not supported for now."),
        ValueError("5.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)"),
        ValidationError({"msg": "Value error, max_model_len (9) is greater than 4", "ctx": {"error": ValueError("x")}}),
        ConfigError("the commit of a/b is not known"),
        KeyError("rope_type"),
        AttributeError("'LlamaConfig' object has no attribute 'x'"),
        ModuleNotFoundError("No module named 'flash_attn'"),
        NotImplementedError("no such quantisation"),
        RepositoryNotFoundError("404"),
        caused(
            OSError("a/b is not a local folder and is not a valid model identifier"), RepositoryNotFoundError("404")
        ),
    ],
)
def test_what_another_try_cannot_change_stops_the_cluster(error: BaseException) -> None:
    found = load_error(error)
    assert is_certain(error) and isinstance(found, ConfigError) and exit_code_of(found) == EXIT_BAD_CONFIG
    assert "\n" not in str(found) and (error is found or str(found).startswith("vLLM refused the model"))


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
        RuntimeError("WorkerProc initialization failed due to an exception in a background process."),
        ValueError(
            "Free memory on device cuda:0 (3.1/80.0 GiB) on startup is less than desired GPU memory utilization"
        ),
        AssertionError("Error in memory profiling. Initial free memory 3.0 GiB, current free memory 5.0 GiB."),
        ConnectionError("Connection reset by peer"),
        TimeoutError("timed out"),
        OSError("We couldn't connect to 'https://huggingface.co' to load the files"),
        OSError(5, "Input/output error"),
        LocalEntryNotFoundError("cannot find the file on the hub nor on the disk"),
        caused(ValueError("cannot load the config"), ConnectionError("no route to host")),
        ValidationError({"msg": "Value error, x", "ctx": {"error": caused(ValueError("x"), TimeoutError("late"))}}),
        MemoryError(),
        EOFError("ended"),
        SystemExit(1),
        caused(InternalError("ranks differ"), InternalError("y")),
    ],
)
def test_what_may_pass_is_tried_again(error: BaseException) -> None:
    found = load_error(error)
    assert not is_certain(error) and isinstance(found, InternalError) and exit_code_of(found) == EXIT_FAILED
    assert str(found).startswith("vLLM could not load the model: ")


def test_the_reason_is_one_short_line() -> None:
    details = [{"msg": f"Value error, reason {i}"} for i in range(2)]
    assert str(load_error(ValidationError(*details))).endswith("settings: reason 0; reason 1")
    assert len(str(load_error(ValueError("x " * 9999)))) < 500


def test_errors_that_cause_each_other_end() -> None:
    one, other = ValueError("a"), ValueError("b")
    one.__cause__, other.__cause__ = other, one
    assert is_certain(one)
