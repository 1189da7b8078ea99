"""Converts llama.cpp's GBNF to Lark, in time linear in the text.

The library parses; its own conversion takes time quadratic in the length of a chain of rules or
of a run of line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode

from tandem.protocol.messages.grammar import one_line
from tandem.runtime.errors import InvalidRequest

_LARK_START = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
_CAMEL_CASE = re.compile(r"([a-z])([A-Z])")


def to_lark(text: str, param: str) -> str:
    """Returns a Lark grammar as it is, and a GBNF grammar converted. Raises InvalidRequest for `param`."""
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
