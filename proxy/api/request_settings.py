"""What requests may ask for and how they are read, as the operator sets it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tandem.proxy.parsers.parser_names import ReasoningParserName, ToolParserName
from tandem.runtime.settings import setting


class RequestSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the decoder of requests and of the parsers of answers."""

    # fmt: off
    tool_call_parser: Annotated[ToolParserName, setting("model", description=
        "Format in which the model writes tool calls; auto chooses by the chat template, none leaves calls in the "
        "answer unless the request requires them.")] = "auto"
    reasoning_parser: Annotated[ReasoningParserName, setting("model", description=
        "Format in which the model writes its thinking; auto chooses by the chat template, none leaves it in the "
        "answer.")] = "auto"
    generation_config: Annotated[str, setting("model", description=
        "Where defaults of sampling come from: auto reads the model's generation_config.json, vllm uses none, and a "
        "folder or file is read in place of the model's.")] = "auto"
    chat_template: Annotated[str, setting("model", description=
        "File with the chat template in place of the model's: Jinja, or JSON with one or several by name as in a "
        "tokenizer_config.json.")] = ""
    max_logprobs: Annotated[int, setting("model", ge=-1, description=
        "Most likely tokens that a request may ask for per token; -1 for all, which makes answers very large.")] = 20
    trust_request_chat_template: Annotated[bool, setting("HTTP", description=
        "Allow requests to bring their own chat template (Jinja in a sandbox, at most 2 s of CPU time).")] = False
    # fmt: on
