"""A rendered prompt: token ids, the hashes of its blocks, and its media."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.messages.media import MediaItem


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: packed, see `tandem.protocol.messages.token_ids`. num_prompt_logprobs, cache_salt and priority: as
    StartPrefill's.


    prefix_hashes: of the full blocks, packed (`protocol.prefix_hash`); the router finds cached prefixes by them.
    media: whose placeholders are among the tokens; readable until the sequence is dropped.
    """

    token_ids: bytes
    num_tokens: int
    num_prompt_logprobs: int | None = None
    cache_salt: str = ""
    priority: int = 0
    prefix_hashes: bytes = b""
    media: tuple[MediaItem, ...] = ()
