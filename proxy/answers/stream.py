"""The server-sent events of a streamed answer, from the first chunk to `[DONE]`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tandem.proxy.answers.answers import Answers
from tandem.proxy.answers.errors import error_body
from tandem.proxy.answers.event_stream import DONE
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.dispatch.generation import Generation
from tandem.runtime.errors import InternalError, TandemError

log = logging.getLogger("proxy")


async def stream_events(
    generation: Generation, request: GenerationRequest, answers: Answers
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events, none of them empty.

    An error before the first event is raised, so that it becomes an HTTP status. A later one becomes the last event.
    """
    has_begun = False
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                if event := answers.chunk(delta):
                    has_begun = True
                    yield event
    except Exception as error:
        if not has_begun:
            raise
        if not isinstance(error, TandemError):
            log.exception("a stream failed")
            error = InternalError("the server failed in mid-stream")
        yield b"data: " + error_body(error) + b"\n\n"
        return
    yield (answers.usage_chunk() + DONE) if request.include_usage else DONE
