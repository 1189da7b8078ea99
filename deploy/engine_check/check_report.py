"""The result of `tandem engine check`: a file that later commands read, and that a user sends us if a step fails.

There is one for each host, device, and version of the engine and of Tandem, in the user's cache. What it holds may be
published: `host_facts.without_names` has been applied to every text in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from tandem.deploy.cluster_config import ClusterConfig
from tandem.deploy.engine_check.host_facts import device_name, driver_version, host_hash, uses_gpus
from tandem.deploy.processes.engine_python import find_engine_python
from tandem.deploy.processes.runtime_dir import cache_dir
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.version import own_version
from tandem.vllm_worker.versions import DEFAULT_VERSION

StepName = Literal["start", "parity", "kill decode", "kill prefill", "transfer rate"]
STEPS: dict[StepName, str] = {
    "start": "start",
    "parity": "the same tokens with KV that moves",
    "kill decode": "kill -9 of a decode worker",
    "kill prefill": "kill -9 of a prefill worker",
    "transfer rate": "transfer rate",
}
"""What a run must do before this host counts as checked, in this order, in words."""


class StepResult(msgspec.Struct, frozen=True):
    name: StepName
    is_ok: bool
    text: str
    """What was found, or why the step failed, in one line."""
    seconds: float
    figures: dict[str, Any] = {}


class CheckReport(msgspec.Struct, frozen=True):
    date: str
    """Of the end, in UTC, as ISO 8601 writes it."""
    host: str
    """See `host_facts.host_hash`."""
    device: str
    """See `host_facts.device_name`."""
    engine: str
    """Name and version."""
    tandem: str
    """Version."""
    driver: str
    """Version of NVIDIA's driver; empty on CPUs."""
    model: str
    settings: dict[str, Any]
    """Settings that were given."""
    steps: list[StepResult]
    skipped: dict[str, str]
    """What such a check could not try on this host, with the reason."""
    versions: dict[str, str] = {}
    torch: dict[str, Any] = {}
    """What torch says of the devices in the engine's Python."""
    nvidia_smi: str = ""
    environment: dict[str, str] = {}
    """Variables that matter to engines."""
    logs: dict[str, str] = {}
    """The last lines of the processes' logs, by cluster and process."""

    @property
    def unproven(self) -> list[StepName]:
        """Steps that have failed or were not reached."""
        done = {step.name for step in self.steps if step.is_ok}
        return [name for name in STEPS if name not in done]

    @property
    def has_passed(self) -> bool:
        return not self.unproven

    @property
    def summary(self) -> str:
        """Outcome and date, for one line."""
        day = self.date.partition("T")[0]
        if self.has_passed:
            rate = next((step.text for step in self.steps if step.name == "transfer rate"), "")
            return f"checked on {day}: ok, {rate}"
        failed = next((step for step in self.steps if not step.is_ok), None)
        return f"checked on {day}: failed at {failed.name}: {failed.text}" if failed else f"not finished on {day}"


def expected_engine(config: ClusterConfig) -> str:
    """Name and version of the engine that workers with these settings run, as they report it.

    Raises ConfigError if a named interpreter cannot run it.
    """
    if config.engine != "vllm":
        return f"tandem {own_version()}"
    version = find_engine_python(config.engine_python).version if config.engine_python else DEFAULT_VERSION
    return f"vllm {version}"


def report_file(engine: str, device: str) -> Path:
    """Returns where the result is kept. engine: with its version. Raises ConfigError for a user without a home."""
    parts = (engine, device, f"tandem {own_version()}", host_hash())
    name = "_".join(re.sub(r"[^\w.]+", "-", part) for part in parts)
    return cache_dir() / "engine_checks" / f"{name}.json"


def save_report(report: CheckReport) -> Path:
    """Keeps the result for later commands. Returns its file. Raises ConfigError and OSError."""
    file = report_file(report.engine, report.device)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_report(report, file)
    return file


def write_report(report: CheckReport, file: Path) -> None:
    """Raises OSError."""
    write_whole(file, msgspec.json.format(msgspec.json.encode(report), indent=1))


def kept_report(engine: str, device: str) -> CheckReport | None:
    """Returns the result of the last check on this host; None without one that can be read."""
    try:
        return msgspec.json.decode(report_file(engine, device).read_bytes(), type=CheckReport)
    except (ConfigError, OSError, msgspec.DecodeError):
        return None


# ---- what other commands say of it


def check_command(engine: str) -> str:
    """engine: with or without its version."""
    return f"tandem engine check --engine {engine.partition(' ')[0]} --model MODEL"


def status_line(engine: str, on_gpus: bool) -> str:
    """Returns what `tandem status` says of an engine on this host. engine: with its version."""
    device = device_name(on_gpus)
    report = kept_report(engine, device)
    found = report.summary if report is not None else f"not checked on this host: {check_command(engine)}"
    driver = driver_version() if report is not None and report.driver else ""
    changed = f"; the driver was {report.driver} and is {driver} now" if report and driver != report.driver else ""
    return f"{engine} on {device}: {found}{changed}"


def unproven_line(config: ClusterConfig) -> str:
    """Returns what `tandem up` says of an engine on this host's GPUs; empty if a check has passed, and on CPUs."""
    if config.ray or not uses_gpus(config):
        return ""
    engine = expected_engine(config)
    report = kept_report(engine, device := device_name(on_gpus=True))
    names = list(STEPS) if report is None else report.unproven
    if not names:
        return ""
    unproven = ", ".join(STEPS[name] for name in names)
    return f"Not proven for {engine} on {device} of this host: {unproven}. Try them with `{check_command(engine)}`."
