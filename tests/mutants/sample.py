"""Draws the mutants of a module: the same for one source and seed, spread over kinds of faults and over lines."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code

from .operators import register

SEED = "fourfold-1"

# Removing a decorator or comparing by identity fails at import or not at all, and says little about the tests.
_UNINFORMATIVE = re.compile(r"RemoveDecorator|_Is$|_IsNot$|Is_(Eq|NotEq|Lt|Gt)|IsNot_(Eq|NotEq|Lt|Gt)")
_IDENTITY = ("core/ReplaceComparisonOperator_Is_IsNot", "core/ReplaceComparisonOperator_IsNot_Is")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One small fault of one module."""

    id: str
    module: str
    operator: str
    occurrence: int
    definition: str
    """Function or class that holds it."""
    line: int
    before: str = ""
    """The lines that it changes, without indentation."""
    after: str = ""
    code: str = ""
    """The whole module with the fault."""

    @property
    def family(self) -> str:
        """Kind of the fault: what is replaced, whatever the replacement."""
        return re.sub(r"_.*", "", self.operator.partition("/")[2])


def draw(root: Path, module: str, count: int) -> list[Mutant]:
    """Return `count` mutants of a module, or all if there are fewer: families in turn, at most one on a line.

    Their order, and so the choice, depends on a hash over the text of the line. An edit elsewhere keeps them.
    """
    source = (root / module).read_text(encoding="utf-8")
    waiting: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in sorted(_candidates(source, module), key=lambda m: m.id, reverse=True):
        waiting[mutant.family].append(mutant)
    drawn: list[Mutant] = []
    lines: set[int] = set()
    while waiting and len(drawn) < count:
        for family in sorted(waiting, key=_hash):
            while waiting[family]:
                mutant = waiting[family].pop()
                if mutant.line not in lines and (changed := _apply(source, mutant)) is not None:
                    drawn.append(changed)
                    lines.add(mutant.line)
                    break
            else:
                del waiting[family]
    return drawn[:count]


def _candidates(source: str, module: str) -> Iterator[Mutant]:
    register()
    nodes, lines = list(ast_nodes(get_ast(source))), source.splitlines()
    for name in cosmic_ray.plugins.operator_names():
        operator_class = cosmic_ray.plugins.get_operator(name)
        if operator_class.arguments() or (_UNINFORMATIVE.search(name) and name not in _IDENTITY):
            continue
        operator = operator_class()
        positions = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        alike: Counter[str] = Counter()
        for occurrence, (node, (line, _)) in enumerate(positions):
            definition = ASTQuery(node).get_definition_name()
            if definition is None or _says_nothing(node, name, lines[line - 1], definition):
                continue
            text = f"{SEED}|{module}|{name}|{definition}|{lines[line - 1].strip()}"
            alike[text] += 1
            yield Mutant(
                id=_hash(f"{text}|{alike[text]}"), module=module, operator=name, occurrence=occurrence,
                definition=definition, line=line,
            )  # fmt: skip


def _says_nothing(node: Any, operator: str, line: str, definition: str) -> bool:
    """Whether it changes a signature or a line of the log, or leaves an attribute out of a constructor."""
    if re.match(r"\s*_?log\.", line):
        return True
    if definition == "__init__" and operator.endswith("RemoveStatement") and re.match(r"\s*self\.\w+(:|\s*=)", line):
        return True
    if node.parent is not None and node.parent.type == "parameters":  # the star before keyword arguments
        return True
    while node.parent is not None:
        child, node = node, node.parent
        if node.type == "annassign" and child is node.children[1]:
            return True
        if node.type == "tfpdef" and child is not node.children[0]:
            return True
        if node.type == "funcdef" and child is node.annotation:
            return True
    return False


def _apply(source: str, mutant: Mutant) -> Mutant | None:
    """Return the mutant with its text, or None where Python could not read it."""
    operator = cosmic_ray.plugins.get_operator(mutant.operator)()
    try:
        code = mutate_code(source, operator, mutant.occurrence)
        compile(code, mutant.module, "exec")
    except (AttributeError, SyntaxError):  # Cosmic Ray cannot replace `except module.Error`
        return None
    changed = [line for line in difflib.ndiff(source.splitlines(), code.splitlines()) if line[:2] in ("- ", "+ ")]
    before, after = (" ".join(line[2:].strip() for line in changed if line[0] == sign) for sign in "-+")
    return Mutant(
        id=mutant.id, module=mutant.module, operator=mutant.operator, occurrence=mutant.occurrence,
        definition=mutant.definition, line=mutant.line, before=before, after=after, code=code,
    )  # fmt: skip


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
