"""llguidance as vLLM uses it, but a grammar that cannot be followed ends its request.

vLLM logs the error of such a grammar, and lets the request go on without constraints.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar


class CheckedGrammar(GuidanceGrammar):
    """A grammar whose error, also one while a mask is computed, rejects the next token."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return bool(super().accept_tokens(request_id, tokens)) and not self.ll_matcher.get_error()


class CheckedGuidance(GuidanceBackend):
    """Compiles grammars. ValueError says what is wrong with one."""

    def compile_grammar(self, *arguments: Any, **named: Any) -> CheckedGrammar:
        grammar = super().compile_grammar(*arguments, **named)
        if error := grammar.ll_matcher.get_error():
            raise ValueError(error)
        return CheckedGrammar(grammar.ll_matcher, grammar.ll_tokenizer, grammar.vocab_size)


def use_checked_grammars(manager: StructuredOutputManager) -> None:
    """Call before the first request with a grammar. It takes as long as vLLM's own backend, which this replaces."""
    if manager.backend is None:
        vocab_size = manager.vllm_config.model_config.get_vocab_size()
        manager.backend = CheckedGuidance(manager.vllm_config, tokenizer=manager.tokenizer, vocab_size=vocab_size)
