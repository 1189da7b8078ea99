"""Compares what workers use of vLLM with another version, none of which runs.

    python -m tools.vllm_signatures --version 0.33.0 [--engine-python PYTHON]

Downloads the wheel of that version, some hundred megabytes without what it requires, and parses it. The other side is
the vLLM of the environment in which workers run. Prints each name that workers import, and each member of vLLM's
objects with a name that occurs in `vllm_worker`, if it is gone or is declared differently: parameters, defaults and
fields. Then it names the functions among them whose code differs: to read, as signatures do not tell what they do.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tandem.deploy.processes.engine_python import find_engine_python

WORKER = Path(__file__).parents[1] / "vllm_worker"
REACHED = (
    "vllm.config.CacheConfig", "vllm.config.DeviceConfig", "vllm.config.LoRAConfig", "vllm.config.ModelConfig",
    "vllm.config.ParallelConfig", "vllm.config.SchedulerConfig",
    "vllm.v1.core.block_pool.BlockPool",
    "vllm.v1.core.encoder_cache_manager.EncoderCacheManager",
    "vllm.v1.core.kv_cache_manager.KVCacheManager",
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.outputs.LogprobsLists", "vllm.v1.outputs.LogprobsTensors",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler",
    "vllm.v1.sample.sampler.Sampler",
    "vllm.v1.structured_output.StructuredOutputManager",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_input_batch.CachedRequestState", "vllm.v1.worker.gpu_input_batch.InputBatch",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker",
    "vllm.v1.worker.worker_base.WorkerBase",
)  # fmt: skip
"""What workers use by an attribute of something else, and do not import."""
ALSO_USED = frozenset({"forward_cpu"})
"""Members of these on which workers depend without naming them."""
STAND_INS = {"structured_output_manager": "VllmGrammars", "kv_event_publisher": "CollectedEvents"}
"""Attributes of vLLM's objects in which workers put an object of their own, and its class."""


class Declared(NamedTuple):
    """What a version says of a name. code: of a function, without its docstring; empty for others."""

    text: str
    code: str = ""


class Sources:
    """The modules of one version. root: a folder, or a wheel."""

    def __init__(self, root: zipfile.Path | Path) -> None:
        self._root = root
        self.module = cache(self._module)

    def _module(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        for file in (self._root / f"{path}.py", self._root / f"{path}/__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Returns the module that declares a name, which may be another one that it is imported from, and how."""
        tree = self.module(module)
        imported: list[tuple[str, str]] = []
        for each in _statements(tree.body) if tree is not None else ():
            match each:
                case ast.ClassDef() | ast.FunctionDef() if each.name == name:
                    return module, each
                case ast.Assign() if any(isinstance(to, ast.Name) and to.id == name for to in each.targets):
                    return module, each
                case ast.AnnAssign() if isinstance(each.target, ast.Name) and each.target.id == name:
                    return module, each
                case ast.ImportFrom():
                    source = self._imported_module(module, each)
                    imported += [(source, to.name) for to in each.names if (to.asname or to.name) == name]
        return next((found for other in imported if (found := self.find(*other)) is not None), None)

    def _imported_module(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parents = module.split(".")
        is_package = (self._root / module.replace(".", "/")).is_dir()
        del parents[len(parents) + is_package - statement.level :]
        return ".".join([*parents, *([statement.module] if statement.module else [])])

    def declared(self, path: str) -> Declared | None:
        module, _, name = path.rpartition(".")
        found = self.find(module, name)
        if found is None:
            return Declared("module") if self.module(path) is not None else None
        return _declared(found[1])

    def members(self, path: str) -> dict[str, Declared]:
        """Returns what a class and those of its bases that are vLLM's declare; nothing for another name."""
        module, declared = self.find(*path.rpartition(".")[::2]) or ("", None)
        if not isinstance(declared, ast.ClassDef):
            return {}
        members: dict[str, Declared] = {}
        for base in declared.bases:
            members |= self.members(f"{module}.{ast.unparse(base).partition('[')[0]}")
        for each in declared.body:
            members |= _members(each)
        return members

    def used_of(self, attribute: str) -> set[str]:
        """Returns the names of `ATTRIBUTE.name` in the engine and its scheduler."""
        modules = ("vllm.v1.engine.core", "vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler")
        trees = [tree for name in modules if (tree := self.module(name)) is not None]
        return {
            each.attr
            for tree in trees
            for each in ast.walk(tree)
            if isinstance(each, ast.Attribute) and ast.unparse(each.value).endswith(attribute)
        }


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements of a module with those below `if` and `try`."""
    for each in body:
        yield each
        if isinstance(each, ast.If | ast.Try):
            yield from _statements([*each.body, *each.orelse])


def _members(statement: ast.stmt) -> dict[str, Declared]:
    """Returns fields and methods that a statement of a class declares, and attributes that a method assigns."""
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name: _declared(statement)}
        case ast.Assign():
            return {to.id: _declared(statement) for to in statement.targets if isinstance(to, ast.Name)}
        case ast.FunctionDef():
            targets = (
                to
                for each in ast.walk(statement)
                if isinstance(each, ast.Assign | ast.AnnAssign)
                for to in (each.targets if isinstance(each, ast.Assign) else [each.target])
            )
            assigned = {to.attr: Declared("attribute") for to in targets if ast.unparse(to).startswith("self.")
                        and isinstance(to, ast.Attribute) and isinstance(to.value, ast.Name)}  # fmt: skip
            return assigned | {statement.name: _declared(statement)}
    return {}


def _declared(statement: ast.stmt) -> Declared:
    match statement:
        case ast.FunctionDef():
            marks = "".join(f"@{ast.unparse(each)} " for each in statement.decorator_list)
            body = statement.body[ast.get_docstring(statement) is not None :]
            return Declared(f"{marks}{statement.name}({ast.unparse(statement.args)})", "\n".join(map(ast.dump, body)))
        case ast.ClassDef():
            return Declared(f"class {statement.name}({', '.join(map(ast.unparse, statement.bases))})")
    return Declared(ast.unparse(statement))


def used_by_workers() -> tuple[list[str], set[str]]:
    """Returns the paths that workers import or reach, and all names by which they may use a member."""
    paths, names = set(REACHED), set(ALSO_USED)
    for file in sorted(WORKER.rglob("*.py")):
        tree = ast.parse(file.read_text())
        modules: dict[str, str] = {}
        for each in ast.walk(tree):
            match each:
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "vllm":
                    paths |= {f"{module}.{name.name}" for name in each.names}
                    modules |= {name.asname or name.name: f"{module}.{name.name}" for name in each.names}
                case ast.Import():
                    modules |= {to.asname: to.name for to in each.names if to.asname and to.name.startswith("vllm")}
                case ast.FunctionDef(name=name) | ast.keyword(arg=str(name)) | ast.Attribute(attr=name):
                    names.add(name)
                case ast.Constant(value=str(name)) if name.isidentifier():  # keys of settings
                    names.add(name)
        paths |= {
            f"{modules[each.value.id]}.{each.attr}"
            for each in ast.walk(tree)
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in modules
            and modules[each.value.id].rpartition(".")[2].islower()
        }  # fmt: skip
    return sorted(paths), names - {"__init__"}


def differences(ours: Sources, theirs: Sources) -> tuple[list[str], list[str]]:
    """Returns what is gone or declared differently, each with both declarations, and the functions of other code."""
    paths, names = used_by_workers()
    declared: dict[str, tuple[Declared | None, Declared | None]] = {}
    for path in paths:
        declared[path] = ours.declared(path), theirs.declared(path)
        own, other = ours.members(path), theirs.members(path)
        known = names if path in REACHED else names | {"__init__"}
        new = {name for name in other.keys() - own.keys() if "@abstractmethod" in other[name].text}
        declared |= {f"{path}.{name}": (own.get(name), other.get(name)) for name in sorted(own.keys() & known | new)}
    found, other_code = [], []
    for path, (one, other_one) in declared.items():
        if one is None or other_one is None or one.text != other_one.text:
            shown = [each.text if each is not None else "none" for each in (one, other_one)]
            found.append(f"{path}\n  - {shown[0]}\n  + {shown[1]}")
        elif one.code != other_one.code:
            other_code.append(path)
    for attribute, name in STAND_INS.items():
        if new := theirs.used_of(attribute) - ours.used_of(attribute):
            found.append(f"{attribute}, which is a {name}\n  + {', '.join(sorted(new))}")
    return found, other_code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", required=True, help="version of the package vllm")
    parser.add_argument("--engine-python", default="", help="as of tandem up")
    arguments = parser.parse_args()
    [ours] = find_engine_python(arguments.engine_python).path.parents[1].glob("lib/python3.*/site-packages")
    with tempfile.TemporaryDirectory() as folder:
        download = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        subprocess.run([sys.executable, *download, f"vllm=={arguments.version}"], check=True)
        [wheel] = Path(folder).glob("*.whl")
        found, other_code = differences(Sources(ours), Sources(zipfile.Path(wheel)))
    print(*found, "", f"{len(other_code)} functions of other code:", *other_code, sep="\n")


if __name__ == "__main__":
    main()
