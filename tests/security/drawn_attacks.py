"""Draws attacks of one client, runs each beside a second tenant, and prints what hurt most.

`python -m tests.security.drawn_attacks [--minutes 10] [--seed 1] [--case SEED/NUMBER] [--only NAME=VALUE]`. A case is
named by its seed and number, and `--case` runs it alone. Several run at once; where they do harm, halves of them run
again until the case is known. Each is judged by what the server's processes spend on it, by
what they still spend when its clients have left, by memory and descriptors, by its answers, and by how the tenant is
served; the tenant's waits count where they happen twice, because other programs may use the machine. Times are compared
with others of the same run: the tenant's waits with those before the attacks, processor time with that of a loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tandem.proxy.http.bodies import MAX_UNSPOOLED_BYTES
from tests.security.attacks import KEY, TENANTS_KEY
from tests.security.cost_account import LOOP, CostAccount, Costs
from tests.security.drawn_bodies import Values, bodies_of
from tests.security.drawn_case import DIMENSIONS, PATHS, Case, drawn
from tests.security.hostile_client import Answer, HostileClient, Sent
from tests.security.second_tenant import LARGE, REQUESTS, STREAM, Plan, SecondTenant, Verdict
from tests.support.cluster import Cluster

MAX_CONNECTIONS = 120
FLAGS = (
    "--served-model-name", "m", "--dtype", "float32", "--kv-cache-gib", "0.25", "--max-body-mib", "64",
    "--media-cache-mib", "8", "--max-connections", str(MAX_CONNECTIONS), "--max-waiting-requests", "4096",
)  # fmt: skip
"""Limits are low, so that few clients reach them."""
VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 16_384
MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/tandem.yaml"
MAX_DESCRIPTORS = 256
"""Of each process, with `python -m`: few, so that what is not counted shows."""
UNCOUNTED = 8
"""Descriptors of a proxy that are neither connections, nor files of requests, nor there at rest."""
MEDIA_FILES = 3
"""Files of a request with one picture: what the body brought, the pixels, and the bytes to make them again."""
DOWNLOAD_FILES = 2
"""Descriptors of a download."""
DOWNLOAD_BYTES = 24 << 20
ATTACK_S = 30.0
"""For which a case runs at most."""
LOOP_STEPS, NUM_LOOPS = 1_000_000, 5
TAIL_S = 1.0
"""For which work goes on that nobody waits for, at most; then the CPU time of as long counts."""
FOLDER = re.compile(r"/(?:tmp|work|root|home|usr|var|etc|opt|srv|mnt|data)/[\w./-]+")
"""A folder of the server's host."""
FAULT = re.compile(r"Traceback|Too many open files|Errno|never retrieved|MemoryError|\bERROR\b|\bCRITICAL\b")
QUIET_S = 4.0
SETTLE_S = 60.0


@dataclass(frozen=True)
class Bounds:
    """What a case may cost. Processor time is in units of `measured_unit_s`."""

    loop: float = 8.0
    """Of the proxy's loop, and more for each MiB and for each 1,000 tokens."""
    loop_per_mib: float = 1.4
    loop_per_1000_tokens: float = 3.4
    reader: float = 34.0
    """Of each request."""
    media: float = 20.0
    worker: float = 40.0
    worker_per_1000_tokens: float = 20.0
    tail_share: float = 0.5
    """Processor that a process wants, beyond the tenant's work, when all clients have left TAIL_S ago. Times what all
    processes wanted for each second that they got before the attacks: on a busy machine little work waits for long."""
    grown_bytes: int = 300 << 20
    wait: float = 12.0
    """The tenant's longest wait, in times of its longest one before the attacks."""


@dataclass(frozen=True)
class Undisturbed:
    """What is measured before the attacks. unit_s: see `measured_unit_s`. wait_s: the tenant's longest one."""

    costs: Costs
    unit_s: float
    wait_s: float

    @property
    def contention(self) -> float:
        """Returns how much processor time was wanted for each second that the machine gave."""
        return max(1.0, sum(self.costs.wanted_s.values()) / max(sum(self.costs.cpu_s.values()), 1e-3))


def measured_unit_s() -> float:
    """Returns how long this machine takes for LOOP_STEPS steps, in processor time."""
    best = float("inf")
    for _ in range(NUM_LOOPS):
        begun, total = time.process_time(), 0
        for number in range(LOOP_STEPS):
            total += number
        best = min(best, time.process_time() - begun)
    return best


@dataclass
class Result:
    """tail: CPU seconds for each second after the clients have left, by kind of process, beyond those of the tenant."""

    cases: list[Case]
    what: list[str]
    answers: list[Answer]
    costs: Costs
    verdict: Verdict
    logged: list[str] = field(default_factory=list)
    tail: dict[str, float] = field(default_factory=dict)
    settled_s: float = 0.0
    found: list[str] = field(default_factory=list)

    @property
    def severity(self) -> float:
        return len(self.found) + max(self.verdict.longest_s.values(), default=0.0) / 10

    @property
    def name(self) -> str:
        return "; ".join(f"{case.seed} {case} [{what[:150]}]" for case, what in zip(self.cases, self.what, strict=True))

    def __str__(self) -> str:
        cpu = ", ".join(f"{kind} {spent:.1f}" for kind, spent in self.costs.cpu_s.most_common(6) if spent >= 0.1)
        slow = ", ".join(f"{name} {each:.1f}" for name, each in self.verdict.longest_s.items() if each > 0.5)
        grown = ", ".join(f"{kind} {size >> 20}" for kind, size in self.costs.grown_bytes.items() if size > 50 << 20)
        most = dict(self.costs.num_descriptors.most_common(2))
        statuses = Counter(each.status for each in self.answers)
        refusals = Counter(f"{each.status} {each.text[:160]}" for each in self.answers if each.status not in (0, 200))
        return (
            f"{self.name}: {dict(refusals.most_common(3))} {dict(statuses)}\n"
            f"    found: {'; '.join(self.found) or 'nothing'}\n"
            f"    CPU s: {cpu}; waits s: {slow}; MiB: {grown}; descriptors {most}; settled after {self.settled_s:.1f} s"
        )


def judge(result: Result, bounds: Bounds, undisturbed: Undisturbed) -> list[str]:
    """Returns what a case did that it may not do, each in a few words that begin with its kind."""
    costs, found, quiet, unit_s = result.costs, list[str](), undisturbed.costs, undisturbed.unit_s
    elapsed = costs.elapsed_s
    own = {kind: spent - quiet.cpu_s[kind] / quiet.elapsed_s * elapsed for kind, spent in costs.cpu_s.items()}
    num_requests = sum(case.at_once for case in result.cases)
    num_tokens = sum(case.at_once * (case.n * case.max_tokens + case.num_prompt_tokens) for case in result.cases)
    mib = (
        sum(case.at_once * case.size for case in result.cases) + sum(each.num_bytes for each in result.answers)
    ) / 2**20
    of_loop = bounds.loop + bounds.loop_per_mib * mib + bounds.loop_per_1000_tokens * num_tokens / 1000
    for kind, spent in own.items():
        limit = of_loop if kind == LOOP else None
        if kind.startswith("proxy") and kind.endswith("/child"):
            limit = bounds.reader * (1 + num_requests / 4)
        elif "media" in kind:
            limit = bounds.media * (1 + num_requests / 8)
        elif kind.startswith(("prefill", "decode", "worker")):
            limit = bounds.worker + bounds.worker_per_1000_tokens * num_tokens / 1000
        if limit is not None and spent > limit * unit_s:
            found.append(f"CPU: {kind} {spent:.1f} s, at most {limit * unit_s:.1f}")
    found += [f"work goes on for nobody: {kind} {spent:.2f}" for kind, spent in result.tail.items()]
    found += [
        f"memory: {kind} {size >> 20} MiB" for kind, size in costs.grown_bytes.items() if size > bounds.grown_bytes
    ]
    num_files = sum(
        case.at_once
        * (
            MEDIA_FILES * (case.media != "none")
            + DOWNLOAD_FILES * (case.route == "download")
            + (case.size > MAX_UNSPOOLED_BYTES)
        )
        for case in result.cases
    )
    for kind, number in costs.num_descriptors.items():
        counted = MAX_CONNECTIONS + UNCOUNTED + num_files if kind.startswith("proxy") else 64
        most = quiet.num_descriptors[kind] + counted
        if number > most and kind != "media-cache":  # which has a file for each item that it keeps, also the tenant's
            found.append(f"descriptors: {kind} {number}, at most {most}")
    found += [f"ended: {kind}" for kind in costs.ended]
    found += [f"log: {line}" for line in result.logged[:2]]
    errors = [each.text for each in result.answers if each.status not in (0, 200) or '"error"' in each.text]
    found += [f"names a folder: {each}" for each in sorted({at for text in errors for at in FOLDER.findall(text)})[:2]]
    found += [f"500: {each}" for each in sorted({each.text[:300] for each in result.answers if each.status == 500})[:2]]
    unserved = [each for each in result.verdict.errors if each.startswith("http") or "too_many_connections" not in each]
    if unserved:  # only probes are promised a connection where clients of several addresses have taken all
        found.append(f"tenant: {len(unserved)} errors {unserved[0][:160]}")
    max_wait_s = bounds.wait * undisturbed.wait_s
    found += [
        f"tenant: {kind} {each:.1f} s, at most {max_wait_s:.1f}"
        for kind, each in result.verdict.longest_s.items()
        if each > max_wait_s
    ]
    return found


class Attacked:
    """A cluster with a second tenant, on which cases are run one after another."""

    def __init__(self, cluster: Cluster, bounds: Bounds, attack_s: float, has_screening: bool) -> None:
        self._cluster = cluster
        self._bounds = bounds
        self._attack_s = attack_s
        self._values = Values(has_screening)
        self._lines = Counter[str]()
        self._headers = {"authorization": f"Bearer {KEY}"}
        self._large_file = self._upload(b"a" * DOWNLOAD_BYTES)
        body = {"prompt": "a", "add_special_tokens": False}
        self._token = httpx.post(f"{cluster.url}/tokenize", json=body, headers=self._headers, timeout=60).json()[
            "tokens"
        ][0]
        self._plan = Plan(cluster.url, TENANTS_KEY, "m", (STREAM, LARGE, *REQUESTS), ("/live", probe_of(cluster)))

    @contextmanager
    def served(self) -> Iterator[None]:
        cluster = self._cluster
        with SecondTenant(self._plan) as self._tenant, CostAccount(cluster.launcher_pid, cluster.port) as self._account:
            time.sleep(QUIET_S)
            self._quiet = self._account.take()
            self.quiet_verdict = self._tenant.take()
            longest_s = max(self.quiet_verdict.longest_s.values())
            self._undisturbed = Undisturbed(self._quiet, measured_unit_s(), longest_s)
            yield

    def run(self, cases: list[Case]) -> Result:
        """Runs cases at once."""
        requests = [self._requests(case) for case in cases]
        self._account.take()
        self._tenant.take()
        answers = asyncio.run(self._attack(cases, requests))
        for batch_id in {found for each in answers for found in re.findall(r'"(batch_\w+)"', each.text)}:
            httpx.post(f"{self._cluster.url}/v1/batches/{batch_id}/cancel", headers=self._headers, timeout=60)
        costs = self._account.take()
        tail, settled_s = self._settle(costs)
        names = [what for what, _ in requests]
        result = Result(cases, names, answers, costs, self._tenant.take(), self._logged(), tail, settled_s)
        result.found = judge(result, self._bounds, self._undisturbed)
        return result

    def search(self, cases: list[Case]) -> list[Result]:
        """Runs cases at once and, where something is found, halves of them, until it is known which case does it.

        A wait of the tenant must occur twice. Returns a result without findings, or the smallest ones with findings.
        """
        result = self.run(cases)
        print(result, flush=True)
        if any(each.startswith("tenant: ") for each in result.found) and len(cases) == 1:
            again = self.run(cases)
            if not any(each.startswith("tenant: ") for each in again.found):
                result.found = [each for each in result.found if not each.startswith("tenant: ")]
        if not result.found or len(cases) == 1:
            return [result]
        middle = len(cases) // 2
        parts = [each for part in (cases[:middle], cases[middle:]) for each in self.search(part) if each.found]
        return parts or [result]  # only together

    async def _attack(self, cases: list[Case], requests: list[tuple[str, list[Sent]]]) -> list[Answer]:
        client = HostileClient(self._cluster.port, KEY)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._attack_s):
                together = zip(cases, requests, strict=True)
                await asyncio.gather(*(client.send_all(sent, (case.client,)) for case, (_, sent) in together))
        return client.answers

    def _logged(self) -> list[str]:
        """Returns lines of the server's logs since the last call that tell of a fault."""
        lines = Counter(line for line in self._cluster.logs().splitlines() if FAULT.search(line))
        new, self._lines = lines - self._lines, lines
        return list(new)

    def _settle(self, costs: Costs) -> tuple[dict[str, float], float]:
        """Waits until the server does no more than for the tenant, and adds what that costs.

        Returns which processes still wanted more than that TAIL_S after the attack, as shares of a processor.
        """
        began, first = time.monotonic(), None
        time.sleep(TAIL_S)
        while True:
            costs.add(self._account.take())
            time.sleep(TAIL_S)
            costs.add(now := self._account.take())
            over: dict[str, float] = {}
            for kind, wanted_s in now.wanted_s.items():
                share = wanted_s / now.elapsed_s - 1.5 * self._quiet.wanted_s[kind] / self._quiet.elapsed_s
                if share > self._bounds.tail_share * self._undisturbed.contention:
                    over[kind] = share
            first = over if first is None else first
            if not over or time.monotonic() - began > SETTLE_S:
                return first, time.monotonic() - began

    def _requests(self, case: Case) -> tuple[str, list[Sent]]:
        """Returns what they are, in words, and the requests."""
        path = PATHS[case.route].replace("{file_id}", self._large_file)
        if case.route == "download":
            return "a file", [Sent(path)] * case.at_once
        what, bodies = bodies_of(case, self._values, self._token)
        if case.route != "batch":
            return what, [Sent(path, body) for body in bodies]
        head = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":'
        lines = b"\n".join(head % number + body + b"}" for number, body in enumerate(bodies))
        made = {"input_file_id": self._upload(lines), "endpoint": "/v1/completions", "completion_window": "24h"}
        return f"a batch of {what}", [Sent(path, made)]

    def _upload(self, content: bytes) -> str:
        files, form = {"file": ("lines.jsonl", content)}, {"purpose": "batch"}
        url = f"{self._cluster.url}/v1/files"
        answer = httpx.post(url, files=files, data=form, headers=self._headers, timeout=60)
        return str(answer.json().get("id", "refused"))


@contextmanager
def attacked(
    folder: Path,
    bounds: Bounds,
    python: str = sys.executable,
    cwd: Path | None = None,
    attack_s: float = ATTACK_S,
    has_screening: bool = True,
) -> Iterator[Attacked]:
    """has_screening: it first measures which values cost most, which takes minutes."""
    keys = folder / "keys"
    keys.write_text(f"{KEY} attacker\n{TENANTS_KEY} tenant\n")
    model = folder / "model"
    shape = f"vocab_size={VOCAB_SIZE}, max_position_embeddings={MAX_MODEL_LEN}"
    make = f"from tests.support.vision_model import *; save_model(Path({str(model)!r}), {shape})"
    subprocess.run([sys.executable, "-c", make], check=True, capture_output=True)  # this process does not import torch
    flags = ("--model", str(model), *FLAGS, "--api-keys-file", str(keys), "--data-dir", str(folder / "data"))
    with Cluster(*flags, python=python, cwd=cwd) as cluster:
        under_attack = Attacked(cluster, bounds, attack_s, has_screening)
        with under_attack.served():
            yield under_attack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--case", action="append", default=[], help="SEED/NUMBER: only these")
    parser.add_argument("--together", type=int, default=6, help="cases that run at once; halved where one does harm")
    parser.add_argument("--checkout", type=Path, help="source and .venv of another version, whose server is attacked")
    parser.add_argument(
        "--only", action="append", default=[], help="NAME=VALUE[,VALUE] of a dimension: no other values"
    )
    arguments = parser.parse_args()
    only = dict(map(values_of, arguments.only))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    python = str(arguments.checkout / ".venv/bin/python") if arguments.checkout else sys.executable
    results = list[Result]()
    end = time.monotonic() + 60 * arguments.minutes
    with (
        tempfile.TemporaryDirectory() as folder,
        attacked(Path(folder), Bounds(), python, arguments.checkout) as server,
    ):
        print(f"quiet: {server.quiet_verdict}", flush=True)
        number = 0
        while time.monotonic() < end:
            names = arguments.case or [
                f"{arguments.seed}/{each}" for each in range(number, number + arguments.together)
            ]
            number += arguments.together
            results += server.search([drawn(name, only) for name in names])
            if arguments.case:
                break
        print_worst(results)


def probe_of(cluster: Cluster) -> str:
    """Returns the URL that a kubelet asks whether the cluster is alive, as the manifest says."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    [container] = next(each for each in documents if each["kind"] == "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    asked = container["livenessProbe"]["httpGet"]
    return f"{cluster.url if asked['port'] == 'http' else cluster.admin_url}{asked['path']}"


def values_of(argument: str) -> tuple[str, list[Any]]:
    """Reads NAME=VALUE[,VALUE]. Raises SystemExit."""
    name, _, listed = argument.partition("=")
    known = {str(value): value for value in DIMENSIONS.get(name, ())}
    if unknown := set(listed.split(",")) - known.keys():
        sys.exit(f"--only {argument}: {', '.join(sorted(unknown))} is none of {', '.join(known) or list(DIMENSIONS)}")
    return name, [known[value] for value in listed.split(",")]


def print_worst(results: list[Result]) -> None:
    print("\n| case | found |\n| --- | --- |")
    for result in sorted(results, key=lambda each: -each.severity)[:20]:
        if result.found:
            print(f"| {result.name} | {'; '.join(result.found)} |")


if __name__ == "__main__":
    main()
    os._exit(0)
