"""Renders a client's chat template in a sandbox, which the kernel ends at a limit on CPU time or memory.

One instruction of a template (`7 ** 4000000`, `'%999999999d' % 1`) may take minutes or gigabytes. A template is also
compiled there, because jinja computes constants when it compiles.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.runtime.errors import InvalidRequest
from tandem.runtime.processes.sandbox import ForkedSandbox, Limits, SandboxLost

TEMPLATE_CPU_S = 2
"""CPU time for a client's own template; a model's template takes milliseconds."""
TEMPLATE_MEMORY_BYTES = 256 << 20
"""Memory that rendering a client's own template may take."""
MAX_RENDERED_CHARACTERS = 16 << 20
"""Length of the text that a client's own template may render: as much as the largest body by default."""
_DEADLINE_S = 30.0
"""Elapsed time, much longer than the CPU time because the machine may be busy."""
_PARAM = "chat_template"


def render_apart(render: Callable[[], str]) -> str:
    """Returns what `render` returns in a sandbox. Blocks for 30 s at most.

    Raises InvalidRequest where `render` does, and if it exceeds a limit.
    """
    with ForkedSandbox(render) as sandbox:
        try:
            text = sandbox.call(_render, b"", Limits(TEMPLATE_CPU_S, TEMPLATE_MEMORY_BYTES, _DEADLINE_S))
        except TimeoutError as error:
            raise _refused(f"{_DEADLINE_S:g} s") from error
        except SandboxLost as lost:
            memory = f"{TEMPLATE_MEMORY_BYTES >> 20} MiB of memory"
            raise _refused(memory if lost.is_out_of_memory else f"{TEMPLATE_CPU_S} s of CPU time") from lost
        return text.decode(errors="surrogatepass")


def _refused(limit: str) -> InvalidRequest:
    return InvalidRequest(f"Rendering chat_template takes more than {limit}; send a simpler template.", _PARAM)


def _render(render: Callable[[], str], _data: bytes) -> bytes:
    """In the sandbox."""
    try:
        text = render()
    except InvalidRequest as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise InvalidRequest(error.message, _PARAM) from error
    if len(text) > MAX_RENDERED_CHARACTERS:
        raise InvalidRequest(
            f"chat_template renders {len(text)} characters; the limit is {MAX_RENDERED_CHARACTERS}.", _PARAM
        )
    return text.encode(errors="surrogatepass")
