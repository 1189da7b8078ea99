"""Replays a record against a running cluster: sends each sequence as a request of its own, and fetches its new record.

The request is a completion with the prompt's token ids. Its record shows how the cluster has understood it, so a
sequence that the API cannot ask for in the same way is refused instead of compared.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from typing import Any

import httpcore
import msgspec

from tandem.deploy.commands.replay import recorded, report
from tandem.protocol.messages.sampling import SamplingParams
from tandem.proxy.records.record import (
    MAX_FILE_BYTES,
    DamagedRecord,
    Record,
    RecordedPrompt,
    RecordedSequence,
    RecordHead,
    decode_record,
)
from tandem.runtime.errors import ConfigError

RECORD_TRIES, RECORD_INTERVAL_S = 20, 0.25
"""A record may still be written, by another proxy, when its answer is complete."""
_MAX_ERROR_BYTES = 64 << 10


def replay_on_cluster(record: Record, model: str, url: str, api_key: str, timeout_s: float) -> int:
    """Prints the outcome and returns the exit status. model: its name in the cluster; empty for the record's.

    Raises ConfigError for what cannot be replayed, and if the cluster does not answer.
    """
    computed = asyncio.run(_compute_all(record, model, url.rstrip("/"), api_key, timeout_s))
    tokens = {number: recorded(each, 0) for number, each in enumerate(computed)}
    return report(record, tokens, f"by the cluster at {url}")


async def _compute_all(record: Record, model: str, url: str, api_key: str, timeout_s: float) -> list[Record]:
    head = record.head
    try:
        async with asyncio.timeout(timeout_s), httpcore.AsyncConnectionPool(ssl.create_default_context()) as pool:
            cluster = _Cluster(pool, url, api_key)
            found = []
            for sequence in record.sequences:
                if not sequence.token_ids:
                    found.append(Record(head, [sequence]))
                    continue
                again = await cluster.compute(request_body(head, sequence, model))
                check_same_request(head, sequence, again)
                found.append(again)
            return found
    except TimeoutError as error:
        raise ConfigError(f"{url} has not answered within {timeout_s:g} s; give a longer --timeout-s") from error
    except (httpcore.UnsupportedProtocol, ValueError) as error:
        raise ConfigError(f"{url!r} is not a URL; write it as http://HOST:PORT or https://HOST:PORT") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"no cluster answers at {url} ({reason}); give another --url") from error


class _Cluster:
    """Calls of one cluster."""

    def __init__(self, pool: httpcore.AsyncConnectionPool, url: str, api_key: str) -> None:
        self._pool, self._url = pool, url
        self._headers = [("Authorization", f"Bearer {api_key}")] * bool(api_key)

    async def compute(self, body: dict[str, Any]) -> Record:
        """Returns the record of a completion."""
        request_id = f"replay-{secrets.token_hex(12)}"
        headers = [("Content-Type", "application/json"), ("X-Request-Id", request_id), ("X-Tandem-Record", "1")]
        status, content = await self._call("POST", "/v1/completions", headers, msgspec.json.encode(body))
        if status != 200:
            raise ConfigError(f"the cluster refuses the recorded request: {_message(status, content)}")
        for _ in range(RECORD_TRIES):
            status, content = await self._call("GET", f"/v1/tandem/records/{request_id}")
            if status != 404:
                break
            await asyncio.sleep(RECORD_INTERVAL_S)
        if status != 200:
            raise ConfigError(f"the cluster has no record of the request: {_message(status, content)}")
        try:
            return decode_record(content)
        except DamagedRecord as error:
            raise ConfigError(f"the cluster's record is not whole: {error.message}") from error

    async def _call(
        self, method: str, path: str, headers: list[tuple[str, str]] | None = None, content: bytes | None = None
    ) -> tuple[int, bytes]:
        """Returns status and body, of which no more than a record's size is read."""
        given = [*self._headers, *(headers or [])]
        async with self._pool.stream(method, self._url + path, headers=given, content=content) as answer:
            received = bytearray()
            async for piece in answer.aiter_stream():
                received += piece
                if len(received) > MAX_FILE_BYTES:
                    raise ConfigError(f"{path} answers with more than {MAX_FILE_BYTES} bytes; is it a Tandem cluster?")
            return answer.status, bytes(received)


def _message(status: int, content: bytes) -> str:
    if status == 401:
        return "it needs an API key; set TANDEM_API_KEY, or give --api-key"
    try:
        message = msgspec.json.decode(content[:_MAX_ERROR_BYTES])["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = "no error message; is the address that of a Tandem cluster?"
    return f"HTTP {status}: {' '.join(str(message).split())}"


def request_body(head: RecordHead, sequence: RecordedSequence, model: str) -> dict[str, Any]:
    """Returns the body of a completion that asks for a recorded sequence."""
    sampling, prompt = head.sampling, head.prompts[sequence.prompt]
    num_tokens = len(sequence.token_ids)
    body: dict[str, Any] = {
        "prompt": prompt.token_ids,
        "max_tokens": num_tokens,
        "min_tokens": min(prompt.stop.min_tokens, num_tokens),
        # The record's stop tokens have the model's own among them, unless its client ignored those.
        "ignore_eos": True,
        "stop_token_ids": sorted(prompt.stop.stop_token_ids),
        "seed": sequence.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if model or head.adapter is not None:
        body["model"] = model or (head.adapter.name if head.adapter is not None else "")
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): value for token_id, value in sampling.logit_bias}
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = sampling.allowed_token_ids
    if head.bad_words:
        body["bad_words"] = head.bad_words
    if sampling.grammar is not None:
        body["structured_outputs"] = {"grammar": sampling.grammar}
    if sampling.thinking is not None and sampling.thinking.max_tokens is not None:
        body["thinking_token_budget"] = sampling.thinking.max_tokens
    return body


def check_same_request(head: RecordHead, sequence: RecordedSequence, again: Record) -> None:
    """Raises ConfigError if the cluster has computed something else than what was recorded."""
    if len(again.sequences) != 1:
        raise ConfigError("the cluster's record has not one sequence")
    other = again.head
    if other.model_id != head.model_id:
        raise ConfigError(
            f"the record is of the model {head.model} ({head.model_id}), but the cluster serves {other.model} "
            f"({other.model_id})"
        )
    digests = [each.adapter.digest if each.adapter is not None else "no adapter" for each in (head, other)]
    if digests[0] != digests[1]:
        raise ConfigError(f"the record needs the LoRA adapter {digests[0]}, but the cluster used {digests[1]}")
    prompt, other_prompt = head.prompts[sequence.prompt], other.prompts[0]
    if prompt.token_ids != other_prompt.token_ids:
        raise ConfigError("the cluster has not used the recorded prompt")
    one, two = _what_matters(head.sampling, prompt), _what_matters(other.sampling, other_prompt)
    for field, value in one.items():
        if value != two[field]:
            raise ConfigError(
                f"the API cannot ask for the recorded request: {field} was {str(value)[:100]}, and would be "
                f"{str(two[field])[:100]}; replay it alone, with --model"
            )


def _what_matters(sampling: SamplingParams, prompt: RecordedPrompt) -> dict[str, Any]:
    """Returns the fields on which the tokens depend, by their names for errors."""
    fields = msgspec.structs.asdict(sampling)
    for name in ("seed", "logprobs", "logprob_token_ids", "is_grammar_optional"):
        del fields[name]
    thinking = sampling.thinking
    if thinking is None or (thinking.max_tokens is None and sampling.grammar is None):
        fields["thinking"] = None  # it has no effect
    if sampling.grammar is not None or prompt.stop.min_tokens:
        fields["stop_token_ids"] = prompt.stop.stop_token_ids
    else:
        fields["stop_token_ids"] = None  # they end sequences only
    return fields
