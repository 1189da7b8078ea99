"""`tandem cache prefetch`: sends a request for one token, so that its prompt's KV is cached before clients need it."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import httpcore

from tandem.runtime.errors import ConfigError, InternalError, Overloaded, TandemError

ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""Routes by the field that only their bodies have."""
_OF_OUTPUT = ("max_completion_tokens", "min_tokens", "n", "best_of", "use_beam_search", "stream_options")
"""Fields that concern the output alone, and could ask for more than one token."""


def read_request(file: str) -> dict[str, Any]:
    """Reads the JSON body of a chat or completions request. file: path, or - for stdin. Raises ConfigError."""
    where = "stdin" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        body = json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); give the body of a request") from error
    if not isinstance(body, dict) or sum(field in body for field in ROUTES) != 1:
        raise ConfigError(f'{where} must be the body of a chat, with "messages", or of a completion, with "prompt"')
    return body


async def prefetch(url: str, body: dict[str, Any], api_key: str, timeout_s: float) -> None:
    """Computes the prompt of a request in a cluster, or loads its KV from a tier, and prints how much was cached.

    url: of the cluster's HTTP endpoint. body: see `read_request`. Raises ConfigError for what the caller can correct,
    Overloaded if the cluster has no capacity at present or does not answer within `timeout_s`.
    """
    request = {key: value for key, value in body.items() if key not in _OF_OUTPUT} | {"max_tokens": 1, "stream": False}
    route = next(route for field, route in ROUTES.items() if field in body)
    content = json.dumps(request).encode()
    headers = [("Content-Type", "application/json")] + [("Authorization", f"Bearer {api_key}")] * bool(api_key)
    try:
        async with asyncio.timeout(timeout_s), httpcore.AsyncConnectionPool(ssl.create_default_context()) as pool:
            answer = await pool.request("POST", url.rstrip("/") + route, headers=headers, content=content)
    except TimeoutError as error:
        raise Overloaded(f"{url} has not answered within {timeout_s:g} s; give a longer --timeout-s") from error
    except (httpcore.UnsupportedProtocol, ValueError) as error:
        raise ConfigError(f"{url!r} is not a URL; write it as http://HOST:PORT or https://HOST:PORT") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"no cluster answers at {url} ({reason}); give its --port or --url") from error
    if answer.status != 200:
        raise _refusal(answer.status, answer.content)
    print(cached_line(answer.content))


def cached_line(answer: bytes) -> str:
    """Returns what an answer's usage says about its prompt. Raises InternalError for an answer without usage."""
    try:
        usage = json.loads(answer)["usage"]
        total, details = usage["prompt_tokens"], usage.get("prompt_tokens_details") or {}
        return f"{total} prompt tokens, {details.get('cached_tokens') or 0} of them were cached"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InternalError("the answer has no usage; is the address that of a Tandem cluster?") from error


def _refusal(status: int, answer: bytes) -> TandemError:
    if status == 401:
        return ConfigError("the cluster needs an API key; set TANDEM_API_KEY, or give --api-key")
    try:
        message = str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = "the answer has no error message; is the address that of a Tandem cluster?"
    kind = (
        ConfigError if 400 <= status < 500 and status != 429 else Overloaded if status in (429, 503) else InternalError
    )
    return kind(f"HTTP {status}: {' '.join(message.split())}")
