"""Checks the grammars of requests, and leaves out of a grammar for calls what cannot be enforced and nobody asked for.

One check of the whole is the rule. Only if it fails, each tool's schema is checked by itself, within limits: a client
may send many tools whose schemas all take long.

Checks run in a sandbox, because nothing in llguidance bounds their time or memory: two hundred patterns of which a
string must match each take minutes and gigabytes. The kernel ends the sandbox at a limit, and what it has allocated is
gone with it. The process that reads the request goes on, so that it can say which field is at fault, or serve the
request without a grammar that its client has not asked for.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode

from tandem.protocol.messages.grammar import (
    CHECK_STACK_BYTES,
    MAX_GRAMMAR_BYTES,
    GrammarCheck,
    check_grammar,
    grammar_bytes,
    one_line,
)
from tandem.proxy.api.json_schemas import find_fault
from tandem.proxy.api.schema import JsonObject
from tandem.proxy.api.structured_output import (
    CallGrammar,
    FreeReason,
    OutputGrammar,
    TextGrammar,
    json_rule,
    lark_of,
)
from tandem.runtime.errors import InternalError, InvalidRequest
from tandem.runtime.processes.sandbox import ForkedSandbox, Limits, SandboxLost

log = logging.getLogger(__name__)

_LARK_START = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
_CAMEL_CASE = re.compile(r"([a-z])([A-Z])")


def to_lark(text: str, param: str) -> str:
    """Returns a Lark grammar as it is, and one in llama.cpp's GBNF converted. Raises InvalidRequest for `param`.

    llguidance parses. Its own conversion takes time quadratic in the length of a chain of rules or of a run of line
    breaks; this one takes time linear in the text.
    """
    if _LARK_START.search(text) is not None:
        return text
    try:
        rules = GrammarParser().parse(text)
        for rule in rules.values():
            rule.alternatives = rule.alternatives.simplify()
        _resolve(rules)
        return "\n".join(["%llguidance {}\n", *map(str, rules.values()), ""])
    except RecursionError as error:
        raise InvalidRequest(f"{param} has groups that are nested too deeply; write them as rules.", param) from error
    except Exception as error:  # the parser raises undocumented types
        raise InvalidRequest(f"{param} is neither a Lark nor a GBNF grammar: {one_line(str(error))}.", param) from error


def _resolve(rules: dict[str, RuleNode]) -> None:
    """Renames rules as Lark demands, in upper case if they are made of terminals only, and resolves references to them.

    Raises ValueError.
    """
    users: dict[str, list[str]] = {name: [] for name in rules}
    num_open = dict.fromkeys(rules, 0)
    """References of each rule to what is not known to be a terminal."""
    for name, rule in rules.items():
        for reference in _references(rule):
            if reference.name not in rules:
                raise ValueError(f"rule '{reference.name}' is not defined")
            reference.target = rules[reference.name]
            users[reference.name].append(name)
            num_open[name] += 1
    if "root" not in rules:
        raise ValueError("there is no rule 'root'")
    terminals = [name for name in rules if not num_open[name] and name != "root"]
    for name in terminals:  # grows
        rules[name].rule_is_terminal = True
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user] and user != "root":
                terminals.append(user)
    taken: dict[str, str] = {}
    for name, rule in rules.items():
        lark_name = "start" if name == "root" else _CAMEL_CASE.sub(r"\1_\2", name.replace("-", "_"))
        rule.name = lark_name.upper() if rule.rule_is_terminal else lark_name.lower()
        if (other := taken.setdefault(rule.name, name)) != name:
            raise ValueError(f"rules '{other}' and '{name}' have the same name in Lark, '{rule.name}'")


def _references(rule: RuleNode) -> Iterator[RuleRefNode]:
    nodes: list[ASTNode] = [rule]
    for node in nodes:  # grows
        if isinstance(node, RuleRefNode):
            yield node
        nodes += node.children()


CHECKS_CPU_S = 2.0
"""Processor time that the checks of one request may take together."""
LAST_CPU_S = 0.5
"""Processor time for checks after one was ended at CHECKS_CPU_S: of a grammar without the schemas of tools."""
CHECK_MEMORY_BYTES = 256 << 20
"""Memory that a check may take beside its stack. A worker's process has as much to compile the grammar and apply it."""
_DEADLINE_S = 100.0
"""Elapsed time of a check. A reader has as much for its job."""
_OVER_TIME = GrammarCheck(
    f"checking it takes more than {CHECKS_CPU_S:g} s of processor time, the limit for all schemas and grammars of a "
    "request. Send fewer patterns that apply to the same text, smaller repetition counts, or a smaller grammar",
    is_over_time=True,
)
_OVER_MEMORY = GrammarCheck(
    f"checking it takes more than {CHECK_MEMORY_BYTES >> 20} MiB of memory. Send fewer patterns that apply to the same "
    "text, smaller repetition counts, or a smaller grammar"
)
_TOO_DEEP = GrammarCheck("it is too deeply nested. Send a flatter one")


class LimitedChecks:
    """A context manager around the checks of one request. At its end the sandbox is gone."""

    def __init__(self) -> None:
        self._budget_s = CHECKS_CPU_S
        """Processor time for the checks of the next sandbox."""
        self._num_ended_at_limit = 0
        self._sandbox: ForkedSandbox | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def __call__(self, text: str) -> GrammarCheck:
        """Checks a grammar like `check_grammar`. A check that exceeds a limit, or crashes, has that as its error.

        Raises InternalError if something else ends the process twice.
        """
        for _ in range(2):
            left_s = self._budget_s - (self._sandbox.cpu_s if self._sandbox is not None else 0.0)
            if left_s <= 0:
                return _OVER_TIME
            memory_bytes = None if self._sandbox is not None else CHECK_STACK_BYTES + CHECK_MEMORY_BYTES
            self._sandbox = sandbox = self._sandbox or ForkedSandbox()
            try:
                limits = Limits(left_s, memory_bytes, _DEADLINE_S)
                return sandbox.call(_check, text.encode(errors="surrogatepass"), limits)
            except TimeoutError:
                self._sandbox = None
            except SandboxLost as lost:
                self._sandbox = None
                self._budget_s -= sandbox.cpu_s
                if (limit := self._limit_reached(lost)) is not None:
                    return limit
        raise InternalError("the process that checks the grammar was lost twice; try again")

    def _limit_reached(self, lost: SandboxLost) -> GrammarCheck | None:
        """Returns None if something else has ended the process."""
        if lost.is_over_time:
            self._num_ended_at_limit += 1
            self._budget_s = LAST_CPU_S if self._num_ended_at_limit == 1 else 0.0
            return _OVER_TIME
        if lost.is_out_of_memory or lost.status == -signal.SIGABRT:  # as the library ends it
            return _OVER_MEMORY
        if lost.status == -signal.SIGSEGV:
            return _TOO_DEEP
        return None


def _check(_context: None, text: bytes) -> GrammarCheck:
    """In the sandbox."""
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 2)  # the library writes there, for every client, why it aborts
    return check_grammar(text.decode(errors="surrogatepass"))


Check = Callable[[str], GrammarCheck]
"""See `tandem.protocol.messages.grammar.check_grammar`."""

MAX_CHECKS = 1500
"""Checks of a request. A grammar of MAX_GRAMMAR_BYTES has fewer different schemas."""
_NUM_KEPT = 32
_NUM_LOGGED = 5
"""Tools that a log line names."""
_MAX_LOGGED_CHARACTERS = 120
"""Of a reason, which has text of the client."""


class CheckedGrammar(NamedTuple):
    """A grammar that workers can compile."""

    text: str | None
    """In llguidance's Lark; None if nothing is left to enforce."""
    num_free_tools: dict[FreeReason, int] = {}  # noqa: RUF012
    """Tools whose arguments may be any object although they have a schema."""


class GrammarChecks:
    """Checks grammars, and keeps the last ones that were served. begin: begins the checks of one request."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Check]] = LimitedChecks) -> None:
        self._begin = begin
        self._kept: OrderedDict[bytes, CheckedGrammar] = OrderedDict()

    def checked(self, wanted: OutputGrammar) -> CheckedGrammar:
        """Raises InvalidRequest for what the client has asked for and cannot be enforced."""
        # JSON, because MessagePack has no integers beyond 64 bits.
        key = blake2b(msgspec.json.encode(wanted), digest_size=16).digest()
        if (found := self._kept.pop(key, None)) is None:
            with self._begin() as check:
                checks = _RequestChecks(check)
                found = checks.of_text(wanted) if isinstance(wanted, TextGrammar) else checks.of_calls(wanted)
        self._kept[key] = found
        while len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return found


class _RequestChecks:
    """The checks of one request."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def of_text(self, wanted: TextGrammar) -> CheckedGrammar:
        text = wanted.text()
        if wanted.schema is None:
            if (size := grammar_bytes(text)) > MAX_GRAMMAR_BYTES:
                raise _too_large(wanted.param, size)
            text = to_lark(text, wanted.param)
        check = self._check(text)
        if check.error:
            raise self._text_error(wanted, check)
        if check.ignored:
            log.warning(
                "%s is served without keywords that cannot be enforced; with strict: true they are refused",
                wanted.param,
            )
        return CheckedGrammar(text)

    def _text_error(self, wanted: TextGrammar, check: GrammarCheck) -> InvalidRequest:
        place = self._place(wanted.schema, wanted.is_strict, check) if wanted.schema is not None else ""
        return InvalidRequest(f"{wanted.param}{place} cannot be served as a grammar: {check.error}.", wanted.param)

    def _place(self, schema: JsonObject, is_strict: bool, check: GrammarCheck) -> str:
        """Returns the place of the fault that the check has found in the schema; "" if it was ended before."""
        if check.is_over_time:
            return ""
        return find_fault(schema, check.error, lambda part: self._check(lark_of(json_rule(part, is_strict))))

    def of_calls(self, wanted: CallGrammar) -> CheckedGrammar:
        free = _FreeTools(wanted)
        for name in wanted.schemas if wanted.tool_format.writes_json else ():
            if reason := wanted.why_no_object(name):
                if wanted.is_asked_for(name):
                    place = ".type" if isinstance(wanted.schemas[name], dict) else ""
                    raise _tool_error(wanted, name, place, reason)
                free.add([name], "invalid", reason)
        text = free.fit()
        if (size := grammar_bytes(text)) > MAX_GRAMMAR_BYTES:
            if not wanted.is_optional:
                raise _too_large(wanted.param, size, free.largest())
            free.add_rest("size", "even the names of the tools are too large as a grammar")
            return free.outcome(None)
        whole = self._check(text)
        if whole.error:
            return free.outcome(self._without_faults(wanted, free, whole))
        if whole.ignored:
            log.warning("tools are served without keywords that cannot be enforced; with strict: true they are refused")
        return free.outcome(text)

    def _without_faults(self, wanted: CallGrammar, free: _FreeTools, whole: GrammarCheck) -> str | None:
        """Returns a grammar without the schemas that cannot be enforced; None if not even names can be.

        whole: the check that has failed.
        """
        if wanted.content is not None:
            check = self._check(wanted.content.text())
            if check.error:
                raise self._text_error(wanted.content, check)
        if wanted.tool_format.writes_json:
            if not whole.is_over_time:
                whole = self._free_faulty(wanted, free, whole)
            if not whole.error:
                return wanted.text(free.kinds)
            if whole.is_over_time and wanted.is_required:
                raise _not_served(wanted, whole)
            free.add_rest("limits", f"the schemas of all tools are too much together: {whole.error}")
            whole = self._check(wanted.text(free.kinds))
            if not whole.error:
                return wanted.text(free.kinds)
        if wanted.is_optional:
            return None
        raise _not_served(wanted, whole)

    def _free_faulty(self, wanted: CallGrammar, free: _FreeTools, whole: GrammarCheck) -> GrammarCheck:
        """Checks each schema by itself, small ones first, and returns the check of the grammar without faulty ones."""
        num_found = 0
        for number, (rule, names) in enumerate(sorted(free.names_by_rule().items(), key=lambda each: len(each[0]))):
            if number >= MAX_CHECKS:
                return whole
            check = self._check(lark_of(rule))
            if check.is_over_time:
                return check
            if not check.error:
                continue
            for name in names:
                if wanted.is_asked_for(name):
                    place = self._place(wanted.arguments(name), name in wanted.strict, check)
                    raise _tool_error(wanted, name, place, check.error)
            free.add(names, "invalid", check.error)
            num_found += 1
        return self._check(wanted.text(free.kinds)) if num_found else whole


class _FreeTools:
    """The tools whose arguments may be any object although they have a schema, and why."""

    def __init__(self, wanted: CallGrammar) -> None:
        self._wanted = wanted
        self._reasons: dict[str, str] = {}
        self.kinds: dict[str, FreeReason] = {}

    def names_by_rule(self) -> dict[str, list[str]]:
        """Returns the other tools, by the rule for their arguments."""
        found: dict[str, list[str]] = {}
        for name in self._wanted.schemas:
            if name not in self.kinds:
                rule = json_rule(self._wanted.arguments(name), name in self._wanted.strict)
                found.setdefault(rule, []).append(name)
        return found

    def largest(self) -> str:
        """Returns one of the other tools, with the largest schema; "" if there is no other."""
        rules = self.names_by_rule()
        return rules[max(rules, key=len)][0] if rules else ""

    def add(self, names: Iterable[str], kind: FreeReason, reason: str) -> None:
        for name in names:
            self.kinds[name], self._reasons[name] = kind, reason

    def add_rest(self, kind: FreeReason, reason: str) -> None:
        """Frees all tools that are not strict."""
        for names in self.names_by_rule().values():
            self.add([name for name in names if name not in self._wanted.strict], kind, reason)

    def fit(self) -> str:
        """Frees the tools with the largest schemas until the grammar is small enough, and returns it.

        It is still too large if the names are, or the strict tools.
        """
        wanted = self._wanted
        text = wanted.text(self.kinds)
        if (size := grammar_bytes(text)) <= MAX_GRAMMAR_BYTES or not wanted.tool_format.writes_json:
            return text
        by_size = sorted(self.names_by_rule().items(), key=lambda each: len(each[0]), reverse=True)
        groups = [names for _, names in by_size if wanted.strict.isdisjoint(names)]

        def fits(number: int) -> bool:
            return grammar_bytes(wanted.text({*self.kinds, *chain(*groups[:number])})) <= MAX_GRAMMAR_BYTES

        reason = f"all tools together have {size} bytes as a grammar, at most {MAX_GRAMMAR_BYTES}"
        number = bisect_left(range(len(groups)), True, key=fits) if fits(len(groups)) else len(groups)
        self.add(chain(*groups[:number]), "size", reason)
        return wanted.text(self.kinds)

    def outcome(self, text: str | None) -> CheckedGrammar:
        """text: None if not even calls are constrained."""
        if self.kinds:
            shown = [f"{name!r} ({self._reasons[name][:_MAX_LOGGED_CHARACTERS]!r})" for name in self.kinds]
            more = f" and {len(shown) - _NUM_LOGGED} more" if len(shown) > _NUM_LOGGED else ""
            log.warning(
                "arguments of tools are not constrained by their schemas: %s%s", ", ".join(shown[:_NUM_LOGGED]), more
            )
        return CheckedGrammar(text, dict(Counter(self.kinds.values())))


def _too_large(param: str, size: int, largest: str = "") -> InvalidRequest:
    """largest: name of the tool that takes most of it."""
    more = f" The largest schema is that of tool {largest!r}." if largest else ""
    return InvalidRequest(f"{param} is too large: {size} bytes as a grammar, at most {MAX_GRAMMAR_BYTES}.{more}", param)


def _not_served(wanted: CallGrammar, whole: GrammarCheck) -> InvalidRequest:
    return InvalidRequest(f"{wanted.param} cannot be served as a grammar: {whole.error}.", wanted.param)


def _tool_error(wanted: CallGrammar, name: str, place: str, reason: str) -> InvalidRequest:
    way_out = "leave out strict" if name in wanted.strict else "leave out tool_choice"
    return InvalidRequest(
        f"The schema of tool {name!r} cannot be enforced, at parameters{place}: {reason}. Correct it, or {way_out}.",
        wanted.param,
    )
