"""A client's chat template cannot take more time or memory than its limits, in whatever way it tries."""

from __future__ import annotations

import resource
import socket
import time
from pathlib import Path

import pytest

from tandem.proxy.text import rendering
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.rendering import Renderer, render_apart
from tandem.runtime.errors import InvalidRequest
from tests.support.fake_workers import make_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return Renderer(ModelText(str(folder)))


def render(renderer: Renderer, template: str) -> str:
    return renderer.chat_text(ChatPrompt(MESSAGES, add_generation_prompt=True, template=template))


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{{ 7 ** 40000000 }}", "CPU time"),  # computed when the template is compiled
        pytest.param("{% set n = messages|length + 6 %}{{ n ** 40000000 }}", "CPU time", marks=pytest.mark.extended),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
        ("{{ 'x' * 10000000000 }}", "MiB of memory"),
        ("{{ '%9999999999d' % 1 }}", "MiB of memory"),
        ("{{ 'x'|center(10000000000) }}", "MiB of memory"),
        (
            "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "Mi",
        ),
        ("{{ 'x' * 17000000 }}", "renders 17000000 characters"),
    ],
)
def test_a_template_that_costs_too_much_is_refused(renderer: Renderer, template: str, limit: str) -> None:
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match=limit) as refused:
        render(renderer, template)
    assert refused.value.param == "chat_template"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    assert grown_kib * 1024 < rendering.TEMPLATE_MEMORY_BYTES / 2, "the memory is that of another process"


def test_the_time_is_that_of_the_template_and_not_of_this_process(renderer: Renderer) -> None:
    end = time.process_time() + 0.1 + rendering.TEMPLATE_CPU_S
    while time.process_time() < end:
        pass
    assert render(renderer, "{{ messages[0].content }}\N{SNOWMAN}") == "hello\N{SNOWMAN}"


def test_other_errors_of_a_template_are_reported(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest, match="request's chat template refuses these messages: no way"):
        render(renderer, "{{ raise_exception('no way') }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        render(renderer, "{{ ''.__class__.__mro__ }}")


def test_a_template_has_no_descriptor_of_the_reader() -> None:
    """A template that got out of jinja's sandbox would otherwise reach the socket to the proxy."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        seen = render_apart(lambda: repr([Path(f"/proc/self/fd/{each.fileno()}").exists() for each in (ours, theirs)]))
    assert seen == "[False, False]"
