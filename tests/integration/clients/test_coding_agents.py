"""Coding agents from the npm registry, unchanged and without a terminal, against a model that follows a script.

`.ci/run` installs them from `package.json` beside this file and names the folder in NODE_CLIENTS. They run with the
settings of docs/clients.md.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.node_clients import node_clients
from tests.support.scripted_model import MODEL, Script, ScriptedWorkers, scripted_model, tool_call, tools_of

CONTENT = "written by a scripted model\n"
FINAL = "The file is there now."
TIMEOUT_S = 180
PAGE = Path(__file__).parents[3] / "docs/clients.md"


def documented(heading: str, language: str, url: str, model: str = MODEL) -> str:
    """Returns the block in a language below a heading of the page, for a server and a model."""
    section = PAGE.read_text().partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    block = section.partition(f"```{language}\n")[2].partition("```")[0]
    return block.replace("http://127.0.0.1:8000", url).replace("my-model", model)


def documented_environment(heading: str, url: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(\S+)$", documented(heading, "sh", url), re.MULTILINE))


def agent(name: str) -> str:
    command = node_clients() / ".bin" / name
    assert command.exists(), f"{command} is missing"
    return str(command)


def script_for(file: Path, writer: str) -> Script:
    """writer: name of the tool that writes a file, with the arguments file_path and content."""

    def script(prompt: str) -> str:
        if writer not in tools_of(prompt):
            return "ok"  # titles and other requests besides the conversation
        if "<|tool|>" in prompt:
            return FINAL
        return f"I write the file.{tool_call(writer, file_path=str(file), content=CONTENT)}"

    return script


def run(command: list[str], folder: Path, **environment: str) -> str:
    home = folder / "home"
    home.mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(file: Path, output: str, workers: ScriptedWorkers) -> None:
    assert file.read_text() == CONTENT
    assert FINAL in output
    last = [prompt for prompt in workers.prompts if "<|tool|>" in prompt][-1]
    assert CONTENT.strip() in last and "write a file" in last


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_claude_code_uses_the_messages_api(tmp_path: Path) -> None:
    command, file = agent("claude"), tmp_path / "work" / "hello.txt"
    file.parent.mkdir()
    with scripted_model(tmp_path, script_for(file, "Write")) as (url, workers):
        output = run(
            [command, "--print", "--allowedTools", "Write", "--", "write a file"],
            file.parent,
            **documented_environment("Claude Code", url),
        )
        check(file, output, workers)


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_qwen_code_uses_chat_completions(tmp_path: Path) -> None:
    command, file = agent("qwen"), tmp_path / "work" / "hello.txt"
    file.parent.mkdir()
    with scripted_model(tmp_path, script_for(file, "write_file")) as (url, workers):
        output = run(
            [command, "--approval-mode", "yolo", "--auth-type", "openai", "--model", MODEL, "--prompt", "write a file"],
            file.parent,
            **documented_environment("Qwen Code", url),
        )
        check(file, output, workers)


def run_codex(folder: Path, url: str, model: str) -> str:
    """Runs Codex with the documented settings in an empty folder `work`."""
    home = folder / "codex"
    home.mkdir()
    (home / "config.toml").write_text(documented("Codex", "toml", url, model))
    work = folder / "work"
    work.mkdir()
    command = [agent("codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "write a file"]
    return run(command, work, CODEX_HOME=str(home), **documented_environment("Codex", url))


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_codex_runs_a_command(tmp_path: Path) -> None:
    file = tmp_path / "work" / "hello.txt"

    def script(prompt: str) -> str:
        if "<|tool|>" in prompt:
            return FINAL
        [shell] = [name for name in tools_of(prompt) if name in ("exec_command", "shell_command", "shell")]
        line = f"printf %s {shlex.quote(CONTENT)} > {shlex.quote(str(file))}; echo it is done"
        key = {"exec_command": "cmd", "shell_command": "command", "shell": "command"}[shell]
        return tool_call(shell, **{key: line if shell != "shell" else ["sh", "-c", line]})

    with scripted_model(tmp_path, script) as (url, workers):
        output = run_codex(tmp_path, url, MODEL)
        assert file.read_text() == CONTENT and FINAL in output
        assert any("it is done" in prompt for prompt in workers.prompts)


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_codex_applies_a_patch(tmp_path: Path) -> None:
    """Codex gives models that it knows by name a custom tool for patches, and expects patches as custom calls."""
    patch = "*** Begin Patch\n*** Add File: hello.txt\n+written by a scripted model\n*** End Patch\n"

    def script(prompt: str) -> str:
        return FINAL if "<|tool|>" in prompt else tool_call("apply_patch", input=patch)

    with scripted_model(tmp_path, script, name="gpt-5.5") as (url, workers):
        output = run_codex(tmp_path, url, "gpt-5.5")
        assert (tmp_path / "work" / "hello.txt").read_text() == CONTENT and FINAL in output
        last = [prompt for prompt in workers.prompts if "<|tool|>" in prompt][-1]
        assert "Begin Patch" in last and "Success" in last


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_codex_runs_code(tmp_path: Path) -> None:
    """To the newest models that it knows by name, Codex gives its tools in an item of the input, in namespaces."""
    code = "text(await tools.exec_command({cmd: 'printf %s done > hello.txt; echo it is done'}))"

    def script(prompt: str) -> str:
        return FINAL if "<|tool|>" in prompt else tool_call("exec", input=code)

    with scripted_model(tmp_path, script, name="gpt-6-sol") as (url, workers):
        output = run_codex(tmp_path, url, "gpt-6-sol")
        assert (tmp_path / "work" / "hello.txt").read_text() == "done" and FINAL in output
        assert any("it is done" in prompt for prompt in workers.prompts)
