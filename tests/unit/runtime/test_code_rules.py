"""Rules for product code that ruff cannot express: on tasks, on written files and on comments of fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.support.product import PACKAGES, name_of, python_files

STARTS_TASKS = {"create_task", "ensure_future", "TaskGroup", "run_coroutine_threadsafe"}
SHARES_THREADS = {"to_thread", "run_in_executor"}
FORKS = {"fork"}
WRITES_WHOLE = {"write_text", "write_bytes"}
MAY_FORK = {
    "runtime/processes/fork_server.py",
    "runtime/processes/forked_child.py",
    "runtime/processes/forked_process.py",
    "proxy/__main__.py",  # calls `ReaderPool.fork`
}
LOOKS_FOR_HOME = {"expanduser", "home", "getuser", "gettempdir"}
MAY_LOOK = {
    "runtime/files/user_paths.py",
    "deploy/processes/user_folders.py",
}
MAY_START = {"runtime/tasks.py"}
MAY_SHARE = {
    "proxy/server.py",  # when the proxy ends and nothing else runs
    "proxy/reading/media_process.py",  # its own executor
}
WRITES_IN_PLACE = re.compile("[rbt]*[wax+][rbt+]*")
"""Modes of `open` that change a file while others may read it."""
CHANGES_FILES = {"open", "fdopen", "FileIO", "replace", "rename"}
COPIES = {"copy", "copy2", "copyfile", "move"}
MAY_WRITE = {
    "runtime/files/whole_file.py",
    "runtime/threads.py",  # /proc
    "deploy/cli.py",  # /dev/null
    "proxy/api/grammar_checks.py",  # /dev/null
    "kv_transfer/tiers/host_memory.py",  # shared memory
    "kv_transfer/tiers/disk.py",  # blocks, under random names
    "media_cache/media_segment.py",  # shared memory, whose header is written last
    "proxy/batches/batch_store.py",  # appends results and a journal, with the batch's lock
    "proxy/batches/file_store.py",  # moves results to their place
    "proxy/batches/json_files.py",  # sets a damaged file aside
    "proxy/cluster/adapter_table.py",  # a lock
    "vllm_worker/load_turns.py",  # a lock
    "proxy/reading/body_reader.py",  # a memfd
    "runtime/processes/forked_process.py",  # a memfd
    "proxy/batches/line_check.py",  # a memfd
    "deploy/sites/ray_actor.py",  # a memfd
    "deploy/sites/ray_process.py",  # empties a log
    "deploy/processes/log_file.py",  # empties a log
    "deploy/processes/runtime_dir.py",  # a lock
    "deploy/configuration_page.py",  # a page of the documentation
}

_VARIANTS = ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")
STARTS_PROGRAMS = {
    "Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "system", "popen",
    "posix_spawn", "posix_spawnp", "create_subprocess_exec", "create_subprocess_shell", "subprocess_exec",
    "subprocess_shell", *(f"exec{each}" for each in _VARIANTS), *(f"spawn{each}" for each in _VARIANTS),
}  # fmt: skip
OWNERS_OF_PROGRAMS = {"subprocess", "os", "asyncio"}
STARTS_PYTHON_ITSELF = {"get_context", "set_start_method", "ProcessPoolExecutor"}
"""What starts an interpreter without a command line that could be checked."""
MAY_START_PROGRAMS = re.compile(
    r"subprocess|os\.(exec|spawn|posix_spawn|system|popen)|from os import|" + "|".join(STARTS_PYTHON_ITSELF)
)

MAX_FIELDS_IN_DOCSTRING = 4


def called_names(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and last name of everything that is called or passed on, e.g. `create_task` of `loop.create_task`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, alias.name


def writes(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and name of calls that write a file in place or put one in the place of another.

    `replace` and `rename` with one argument are those of paths; `str.replace` has two.
    """
    if not any(f"{each}(" in source for each in (*CHANGES_FILES, *WRITES_WHOLE, *COPIES)):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = getattr(function.value, "id", "") if isinstance(function, ast.Attribute) else ""
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        flags = {each.attr for part in given for each in ast.walk(part) if isinstance(each, ast.Attribute)}
        if (
            name in WRITES_WHOLE
            or (name in {"open", "fdopen", "FileIO"} and any(map(WRITES_IN_PLACE.fullmatch, modes)))
            or (name == "open" and flags & {"O_WRONLY", "O_RDWR", "O_CREAT"})
            or (name in {"replace", "rename"} and (owner == "os" or (len(node.args) == 1 and not node.keywords)))
            or (name in COPIES and owner == "shutil")
        ):
            yield node.lineno, name


def programs(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and name of calls that may start Python otherwise than by `python_command`.

    The command must be written as `python_command(...)` in the call, or in the function as `command = python_command`,
    or begin with the name of another program.
    """
    if not MAY_START_PROGRAMS.search(source):
        return
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in OWNERS_OF_PROGRAMS
        for alias in node.names
    }
    made = [
        node.targets[0].id if _is_python_command(node.value) else ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "command"
    ]
    is_command_safe = bool(made) and all(made)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = getattr(function.value, "id", "?") if isinstance(function, ast.Attribute) else ""
        if name in STARTS_PYTHON_ITSELF:
            yield node.lineno, name
        if name not in STARTS_PROGRAMS or not (
            owner in OWNERS_OF_PROGRAMS or name in imported or "subprocess_" in name
        ):
            continue
        if owner == "asyncio" and name == "run":
            continue
        given = node.args[name.startswith("posix_spawn") : None]
        command = given[0] if given else None
        if isinstance(command, ast.Starred):
            command = command.value
        first = command.elts[0] if isinstance(command, ast.List) and command.elts else command
        is_other = isinstance(first, ast.Constant) and not str(first.value).rpartition("/")[2].startswith("python")
        is_named = isinstance(command, ast.Name) and command.id == "command" and is_command_safe
        if not (_is_python_command(command) or is_named or is_other):
            yield node.lineno, name


def _is_python_command(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "python_command"


def fields_in_docstrings(source: str) -> Iterator[tuple[int, str, int]]:
    """Yields line and name of each class, and how many of its fields its docstring describes as "name: ..."."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and (text := ast.get_docstring(node)):
            fields = [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            yield node.lineno, node.name, sum(bool(re.search(rf"\b{field}\b[^.\n]*:", text)) for field in fields)


def broken(names: set[str], allowed: set[str], packages: Iterable[str] = PACKAGES) -> list[str]:
    found = []
    for file in python_files(packages):
        name, source = name_of(file), file.read_text()
        if name not in allowed and any(each in source for each in names):
            found += [f"{name}:{line} {each}" for line, each in called_names(source) if each in names]
    return found


def test_tasks_are_started_in_one_place() -> None:
    assert not broken(STARTS_TASKS, MAY_START), "use tandem.runtime.tasks, so that the task does not end silently"


def test_processes_are_forked_in_one_place() -> None:
    assert not broken(FORKS, MAY_FORK), "use tandem.runtime.processes.fork_server or forked_child"


def test_python_is_started_in_one_way() -> None:
    found = [f"{name_of(file)}:{line} {name}" for file in python_files() for line, name in programs(file.read_text())]
    assert not found, "use tandem.runtime.processes.command_line, so that it imports nothing from the working folder"


def test_a_user_may_have_no_home() -> None:
    """What the standard library raises for such a user is no error that an operator could act on."""
    assert not broken(LOOKS_FOR_HOME, MAY_LOOK), "use tandem.runtime.files.user_paths"


def test_files_are_written_whole() -> None:
    found = [
        f"{name}:{line} {called}"
        for file in python_files()
        if (name := name_of(file)) not in MAY_WRITE
        for line, called in writes(file.read_text())
    ]
    assert not found, "use tandem.runtime.files.whole_file, so that no reader sees a part of a file"


def test_blocking_work_of_a_proxy_has_threads_of_its_kind() -> None:
    found = broken(SHARES_THREADS, MAY_SHARE, ("proxy", "media_cache"))
    assert not found, "use tandem.runtime.threads, so that work which never ends stops no other kind of work"


def test_fields_are_described_beside_them() -> None:
    found = [
        f"{name_of(file)}:{line} {name}"
        for file in python_files()
        for line, name, number in fields_in_docstrings(file.read_text())
        if number > MAX_FIELDS_IN_DOCSTRING
    ]
    assert not found, "put a comment below each field instead of a paragraph above all of them"


def test_the_rule_counts_fields() -> None:
    fields = "".join(f"\n    {name}: int" for name in ("one", "two", "three", "four"))
    source = 'class A:\n    """An A. one: first. two, three: others."""' + fields
    assert list(fields_in_docstrings(source)) == [(1, "A", 3)]


@pytest.mark.parametrize(
    "source", ["asyncio.create_task(x)", "loop.create_task(x)", "from asyncio import ensure_future"]
)
def test_the_rule_sees(source: str) -> None:
    assert any(name in STARTS_TASKS for _, name in called_names(source))


@pytest.mark.parametrize(
    "source",
    [
        'open(file, "w")', 'open(file, mode="wb")', 'file.open("a")', 'file.open("r+b")', "file.write_text(text)",
        'file.with_suffix(".tmp").write_bytes(data)', "os.open(file, os.O_CREAT | os.O_WRONLY)", 'os.fdopen(fd, "w")',
        "os.replace(partial, file)", "partial.replace(file)", "partial.rename(file)", "shutil.move(partial, file)",
    ],
)  # fmt: skip
def test_the_rule_sees_a_file_that_is_written_in_place(source: str) -> None:
    assert list(writes(source))


@pytest.mark.parametrize(
    "source", ["open(file)", 'file.open("rb")', 'text.replace("a", "b")', "msgspec.structs.replace(batch, status=a)"]
)
def test_the_rule_passes(source: str) -> None:
    assert not list(writes(source))


@pytest.mark.parametrize(
    "source",
    [
        'subprocess.run([sys.executable, "-m", "x"])', "subprocess.Popen(words)", "subprocess.run(args=words)",
        'os.execv(sys.executable, ["python"])', 'os.system("python -m venv x")', "os.posix_spawn(python, [python], {})",
        'await asyncio.create_subprocess_exec(sys.executable, "-m", "x")', "await loop.subprocess_exec(P, python)",
        "from subprocess import run\nrun(words)", 'subprocess.run(["/usr/bin/python3", "-c", text])',
        "command = [python]\nsubprocess.run(command)", "multiprocessing.get_context('spawn')", "ProcessPoolExecutor(2)",
        "command = [python]\nsubprocess.run(command)\ncommand = python_command()",
    ],
)  # fmt: skip
def test_the_rule_sees_another_way_to_start_python(source: str) -> None:
    assert list(programs(source))


@pytest.mark.parametrize(
    "source",
    [
        'subprocess.run(python_command("-c", text))', 'subprocess.run(["nvidia-smi", "-L"])', "asyncio.run(main())",
        'asyncio.create_subprocess_exec(*python_command("-m", "x"), env={})', "actor.start.run(words)",
        "command = python_command()\nos.posix_spawn(python, command, {})",
    ],
)  # fmt: skip
def test_the_rule_allows_the_one_way_to_start_python(source: str) -> None:
    assert not list(programs(source))
