"""The runtime folder of sockets and config files: private to its user, of one launcher, and where sockets fit."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.deploy.processes import runtime_dir as module
from tandem.deploy.processes.runtime_dir import (
    MAX_FOLDER_BYTES,
    MAX_SOCKET_PATH_BYTES,
    VLLM_MAX_FOLDER_BYTES,
    create_runtime_dir,
    make_process_folder,
    remove_runtime_dir,
    runtime_dir,
)
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import ToProxyControl
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError
from tandem.runtime.processes.forked_child import ForkedChild, fork_child

PORT = 51234


@pytest.fixture(autouse=True)
def _base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    yield
    for lock in (lock for locks in module._locks.values() for lock in locks):
        os.close(lock)
    module._locks.clear()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_folder_is_private_for_any_umask(mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = create_runtime_dir(PORT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()


def test_a_folder_made_by_another_user_is_refused(tmp_path: Path) -> None:
    """In /tmp, another user could create the folder or a link in its place."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    runtime_dir(PORT).symlink_to(elsewhere)
    for _ in range(2):  # a refusal keeps no lock
        with pytest.raises(ConfigError, match="another user"):
            create_runtime_dir(PORT)


@pytest.mark.parametrize(
    "make", [lambda file: file.symlink_to("elsewhere"), lambda file: os.mkfifo(file), lambda file: file.mkdir()]
)
def test_a_lock_made_by_another_user_is_refused(make: Callable[[Path], None]) -> None:
    folder = runtime_dir(PORT)
    make(folder.with_name(f"{folder.name}.lock"))
    with pytest.raises(ConfigError, match=f"{folder}\\.lock.*choose another --port, or remove"):
        create_runtime_dir(PORT)
    assert not folder.exists()


def test_a_runtime_folder_has_one_launcher() -> None:
    create_runtime_dir(PORT)  # by this process, which is alive
    with pytest.raises(
        ConfigError, match=rf"already uses port {PORT} \(process {os.getpid()}\); choose another --port"
    ):
        create_runtime_dir(PORT)
    create_runtime_dir("worker-a")
    with pytest.raises(ConfigError, match=r"already running \(process \d+\); choose another --name"):
        create_runtime_dir("worker-a")


def test_a_launcher_keeps_its_folder_though_its_lock_was_removed() -> None:
    """Folders such as /tmp are cleaned by age."""
    folder = create_runtime_dir(PORT)
    folder.with_name(f"{folder.name}.lock").unlink()
    with pytest.raises(ConfigError, match=rf"already uses port {PORT} \(process {os.getpid()}\)"):
        create_runtime_dir(PORT)
    assert (folder / "launcher.pid").exists()


def test_the_folder_of_a_dead_launcher_is_made_again() -> None:
    """Even if the kernel has given its process id to another process, which is this one here."""
    runtime_dir(PORT).mkdir()
    (runtime_dir(PORT) / "launcher.pid").write_text(str(os.getpid()))
    old = runtime_dir(PORT) / "old.sock"
    old.touch()
    create_runtime_dir(PORT)
    assert not old.exists(), "files of a dead launcher are removed"


def test_a_start_removes_what_killed_launchers_have_left_for_other_ports(tmp_path: Path) -> None:
    """But neither the folder of one that runs, nor the logs of a cluster that has failed."""
    running = create_runtime_dir("runs")
    failed = create_runtime_dir("failed")
    (failed / "logs").mkdir()
    remove_runtime_dir(failed, keeps_logs=True)
    killed = fork_child(lambda: (create_runtime_dir(PORT), os.kill(os.getpid(), signal.SIGKILL)), set(), {})
    killed.wait(60)
    left = runtime_dir(PORT)
    assert left.exists() and left.with_name(f"{left.name}.lock").exists()
    alone = tmp_path / "tandem-1.lock"  # of a launcher that was killed before it had made the folder
    alone.touch()
    foreign = tmp_path / "tandem-2.lock"
    foreign.symlink_to(tmp_path / "elsewhere")
    started = create_runtime_dir(PORT + 1)
    locks = {each.with_name(f"{each.name}.lock") for each in (running, started)}
    assert set(tmp_path.iterdir()) == {running, failed, started, *locks, foreign}


def test_a_start_waits_for_one_that_removes_an_abandoned_folder() -> None:
    folder = runtime_dir(PORT)
    with folder.with_name(f"{folder.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        releasing = threading.Timer(0.1, lambda: fcntl.flock(held, fcntl.LOCK_UN))
        releasing.start()
        assert create_runtime_dir(PORT) == folder
        releasing.join()


def test_nothing_is_left_of_a_folder_that_its_owner_removes(tmp_path: Path) -> None:
    for _ in range(3):
        folder = create_runtime_dir(PORT)
        (folder / "metrics").mkdir()
        remove_runtime_dir(folder)
        assert list(tmp_path.iterdir()) == []


def test_only_logs_are_left_of_a_cluster_that_has_failed(tmp_path: Path) -> None:
    folder = create_runtime_dir(PORT)
    for name in ("logs", "metrics"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    (folder / "link").symlink_to(folder / "logs")
    (folder / "a.sock").touch()
    remove_runtime_dir(folder, keeps_logs=True)
    assert sorted(map(str, (path.relative_to(tmp_path) for path in tmp_path.rglob("*")))) == [
        folder.name, f"{folder.name}/logs", f"{folder.name}/logs/file",
    ]  # fmt: skip
    assert list(create_runtime_dir(PORT).iterdir()) == [folder / "launcher.pid"]


# ---- simultaneous starts


class Starter:
    """A process that creates the folder when `go` is written to, says how that ended, and stays until it is killed."""

    def __init__(self, go: int) -> None:
        self.read, write = os.pipe()
        self.child: ForkedChild = fork_child(lambda: self._start(go, write), {go, write}, {})
        os.close(write)

    @staticmethod
    def _start(go: int, write: int) -> None:
        os.read(go, 1)
        try:
            folder = create_runtime_dir(PORT)
            answer = "created" if (folder / "launcher.pid").read_text() == str(os.getpid()) else "not the owner"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        signal.pause()

    def outcome(self) -> str:
        return os.read(self.read, 4096).decode()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self.read)


def start_together(number: int) -> list[Starter]:
    go, start = os.pipe()
    starters = [Starter(go) for _ in range(number)]
    time.sleep(0.002)  # so that they wait already
    os.write(start, b"g" * number)
    os.close(start)
    os.close(go)
    return starters


@pytest.mark.parametrize(
    ("left", "num_pairs"),
    [
        ("nothing", 15),
        pytest.param("nothing", 100, marks=pytest.mark.extended),
        ("the folder of a killed launcher", 10),
        pytest.param("the folder of a killed launcher", 40, marks=pytest.mark.extended),
    ],
)
def test_of_two_simultaneous_launchers_exactly_one_owns_the_folder(left: str, num_pairs: int) -> None:
    folder = runtime_dir(PORT)
    for _ in range(num_pairs):
        if left == "the folder of a killed launcher":
            folder.mkdir(exist_ok=True)
            for number in range(20):
                (folder / f"{number}.sock").touch()
        starters = start_together(2)
        outcomes = sorted(starter.outcome() for starter in starters)
        refused = f"ConfigError: a cluster already uses port {PORT}"
        assert outcomes[0].startswith(refused) and outcomes[0].endswith("; choose another --port"), outcomes
        assert outcomes[1] == "created", outcomes
        for starter in starters:
            starter.kill()
        if left == "nothing":
            remove_runtime_dir(folder)
            folder.with_name(f"{folder.name}.lock").unlink()


@pytest.mark.parametrize("num_rounds", [8, pytest.param(50, marks=pytest.mark.extended)])
def test_a_folder_that_is_being_removed_is_created_once(num_rounds: int) -> None:
    """The next launchers may have opened the lock that the last one removes."""
    for _ in range(num_rounds):
        folder = create_runtime_dir(PORT)
        starters = start_together(3)
        remove_runtime_dir(folder)
        outcomes = [starter.outcome() for starter in starters]
        assert outcomes.count("created") <= 1, outcomes  # none, if they were refused before
        assert all(each == "created" or each.startswith("ConfigError: a cluster") for each in outcomes), outcomes
        for starter in starters:
            starter.kill()
        create_runtime_dir(PORT)  # their locks have ended with them
        remove_runtime_dir(folder)


# ---- where sockets fit


def base_of(num_bytes: int, letter: str = "x") -> Path:
    """Makes a folder in /tmp whose path has so many bytes."""
    base = Path(f"/tmp/{os.getpid()}-")
    rest = num_bytes - len(os.fsencode(base))
    size = len(letter.encode())
    base = Path(f"{base}{letter * (rest // size)}{'y' * (rest % size)}")
    base.mkdir()
    assert len(os.fsencode(base)) == num_bytes
    return base


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_folder_of_130_characters_is_not_used(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    base = base_of(130)
    monkeypatch.setenv(variable, str(base))
    assert runtime_dir(PORT) == Path(f"/tmp/tandem-{os.getuid()}-{PORT}")
    process_folder = make_process_folder("decode-0")
    assert process_folder.parent == Path("/tmp") and stat.S_IMODE(process_folder.stat().st_mode) == 0o700
    process_folder.rmdir()
    base.rmdir()


@pytest.mark.parametrize("letter", ["x", "ü", "界", " "])
async def test_sockets_fit_up_to_the_last_byte(monkeypatch: pytest.MonkeyPatch, letter: str) -> None:
    """Of the folder's path bytes count, not letters."""
    longest = MAX_FOLDER_BYTES - len(f"/tandem-{PORT}")
    fits, surplus = base_of(longest, letter), base_of(longest + 1, letter)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(surplus))
    assert runtime_dir(PORT).parent == Path("/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(fits))
    folder = create_runtime_dir(PORT)
    assert folder.parent == fits and len(os.fsencode(folder / "media-cache.sock")) == MAX_SOCKET_PATH_BYTES
    context = new_context()
    context.router(f"ipc://{folder}/media-cache.sock", Codec(ToProxyControl), lambda *_: None)
    assert (folder / "media-cache.sock").is_socket()
    context.destroy(linger=0)
    remove_runtime_dir(folder)
    fits.rmdir()
    surplus.rmdir()


def test_unusable_folders_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = Path(f"/tmp/tandem-{os.getuid()}-{PORT}")
    file = tmp_path / "file"
    file.touch()
    for base in ("relative", str(tmp_path / "none"), str(file), f"{tmp_path}/\udcff", f"{tmp_path}/a\nb", ""):
        if base.endswith(("\udcff", "b")):
            Path(base).mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        assert runtime_dir(PORT) == usual, base
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert runtime_dir(PORT) == tmp_path / usual.name


def test_without_a_usable_folder_one_line_names_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(130)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr(module, "is_writable", lambda folder: False)
    with pytest.raises(ConfigError) as raised:
        runtime_dir(8000)
    assert raised.value.message == (
        f"there is no folder for the cluster's sockets: XDG_RUNTIME_DIR={base} is 52 bytes too long for the paths of "
        "sockets; /tmp is not a folder to which this user may write; /var/tmp is not a folder to which this user may "
        "write. Set XDG_RUNTIME_DIR to a folder to which this user may write, with a path of at most 78 bytes"
    )
    base.rmdir()


@pytest.mark.parametrize("name", ["worker-" + "h" * 63, "worker-a/../b", "worker-ü"])
def test_any_name_of_joined_workers_has_a_short_folder(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    base = base_of(40)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    folder = create_runtime_dir(name)
    assert folder.parent == base and len(folder.name) < 32
    assert runtime_dir(name) == folder != runtime_dir(name + "x")
    remove_runtime_dir(folder)
    base.rmdir()


def test_a_folder_for_a_process_has_room_for_vllms_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = VLLM_MAX_FOLDER_BYTES - len("/tandem-decode-0-12345678")
    for base, is_used in ((base_of(longest), True), (base_of(longest + 1), False)):
        monkeypatch.setenv("TMPDIR", str(base))
        folder = make_process_folder("decode-0")
        assert (folder.parent == base) is is_used
        folder.rmdir()
        base.rmdir()
