"""Prints how a second tenant is served beside each attack, by the server of this or of another version.

`python -m tests.security.attack_report [CHECKOUT] [NAME...]`. CHECKOUT: a folder with the source and the `.venv` of the
version whose server is attacked; "." is this one. NAME: of attacks; all of them without. Each attack gets a new cluster
and at most ATTACK_S. The largest process of a server that takes more than MAX_MEMORY_BYTES is killed, as the kernel
would do.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from tests.faults.streams import descendants
from tests.security.attacker import Attack, Attacker
from tests.security.attacks import ATTACKS
from tests.security.file_attacks import FILE_ATTACKS
from tests.security.marked_answers import MARKED_ATTACKS, marker_model
from tests.security.second_tenant import Plan, SecondTenant, private_bytes
from tests.support.cluster import MODEL, Cluster

ATTACK_S = 60.0
MAX_MEMORY_BYTES = 6 << 30


def report(attack: Attack, checkout: Path, folder: Path) -> str:
    keys = folder / "keys"
    keys.write_text("key-of-the-attacker attacker\nkey-of-the-tenant tenant\n")
    flags = ["--api-keys-file", str(keys), "--data-dir", str(folder / "data"), "--max-waiting-requests", "4096"]
    flags += ["--max-body-mib", "64", "--kv-cache-gib", "0.25"]
    if attack in MARKED_ATTACKS:
        model = marker_model(folder, "<|start|>")
        flags += ["--model", str(model), "--served-model-name", MODEL, "--tool-call-parser", "openai"]
    is_other = checkout != Path.cwd()
    python = str(checkout / ".venv/bin/python") if is_other else sys.executable
    cluster = Cluster(*flags, python=python, cwd=checkout if is_other else None)
    cluster.__enter__()
    killed: list[int] = []
    has_ended = threading.Event()
    watching = threading.Thread(target=limit_memory, args=(cluster.launcher_pid, killed, has_ended))
    watching.start()
    try:
        large = 20_000 if attack in MARKED_ATTACKS else 200_000
        plan = Plan(cluster.url, "key-of-the-tenant", large_prompt_bytes=large, polled=("/live", "/v1/files"))
        with SecondTenant(plan, cluster.launcher_pid) as tenant:
            attacker = Attacker(cluster, "key-of-the-attacker", folder)
            attacking = threading.Thread(target=attack.run, args=(attacker,), daemon=True)
            attacking.start()
            attacking.join(ATTACK_S)
        ended = "" if not attacking.is_alive() else f"; still running after {ATTACK_S:g} s"
        return f"{attack.name}: {tenant.verdict}{ended}; {len(killed)} processes killed for memory"
    finally:
        has_ended.set()
        watching.join()
        end([cluster.launcher_pid, *descendants(cluster.launcher_pid)])


def limit_memory(launcher_pid: int, killed: list[int], has_ended: threading.Event) -> None:
    while not has_ended.wait(0.05):
        used = {pid: private_bytes(pid) for pid in descendants(launcher_pid)}
        if sum(used.values()) > MAX_MEMORY_BYTES:
            largest = max(used, key=lambda pid: used[pid])
            end([largest])
            killed.append(largest)
            has_ended.wait(1.0)


def end(pids: list[int]) -> None:
    """Kills these processes. One that has ended since is left out."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    checkout, names = Path(arguments[0] if arguments else ".").resolve(), arguments[1:]
    attacks = [*ATTACKS, *FILE_ATTACKS, *MARKED_ATTACKS]
    for attack in attacks:
        if not names or attack.name in names:
            with tempfile.TemporaryDirectory() as folder:
                print(report(attack, checkout, Path(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # requests of an attack may still wait
