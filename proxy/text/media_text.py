"""Writes images and videos into a rendered chat: as many placeholders for each as it has tokens. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tandem.protocol.messages.media import MediaKind
from tandem.proxy.text.prompt import CachedMedia, MediaPlaceholder, MediaPrompt
from tandem.runtime.errors import InvalidRequest


def media_prompt(
    text: str,
    media: Sequence[CachedMedia],
    placeholders: Mapping[MediaKind, MediaPlaceholder],
    add_special_tokens: bool,
) -> MediaPrompt:
    """Replaces each placeholder in the rendered chat by its item's replacement, like transformers' processors.

    Raises InvalidRequest if there are more or fewer than the items need.
    """
    replacements: dict[str, Iterator[str]] = {}
    for kind, placeholder in placeholders.items():
        wanted = [item.replacement for item in media if item.kind == kind]
        if (num_found := text.count(placeholder.text)) != len(wanted):
            raise InvalidRequest(
                f"The rendered chat has {num_found} {kind} placeholders ({placeholder.text}) for {len(wanted)} "
                f"{kind}s; send media as content parts and write no placeholders into the text.",
                "messages",
            )
        replacements[placeholder.text] = iter(wanted)
    pattern = "|".join(re.escape(each) for each in replacements)
    expanded = re.sub(pattern, lambda found: next(replacements[found[0]]), text)
    token_ids = {kind: placeholder.token_id for kind, placeholder in placeholders.items()}
    return MediaPrompt(expanded, list(media), token_ids, add_special_tokens)
