"""Which reasons a method can raise, found by reading the source: every PagepoolError that it or what it calls makes.

Calls are followed by name: functions of the modules that are read, methods of the same class, and methods of what an
attribute or variable is known to be (`owners`). Too much may be found where a function checks what its caller has made
sure of, too little where an owner is unknown: `unreached` tells which errors no method leads to.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagepool.errors import Reason

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Place:
    """Where a function is: its class, or "" for one of a module, the module's name, and its own name."""

    owner: str
    module: str
    name: str


@dataclass(slots=True)
class Walk:
    """The functions of some modules."""

    owners: Mapping[str, str]
    functions: dict[Place, Function] = field(default_factory=dict)
    methods: dict[tuple[str, str], Place] = field(default_factory=dict)  # by class and name
    imports: dict[tuple[str, str], Place] = field(default_factory=dict)  # by module and name
    reached: set[Place] = field(default_factory=set)

    def read(self, paths: Iterable[Path]) -> None:
        """Add the functions of these files."""
        for path in paths:
            for node in parsed(path).body:
                if isinstance(node, Function):
                    self._add(Place("", path.stem, node.name), node)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    home = node.module.rsplit(".", 1)[-1]
                    self.imports.update({(path.stem, one.name): Place("", home, one.name) for one in node.names})
                elif isinstance(node, ast.ClassDef):
                    for part in node.body:
                        if isinstance(part, Function):
                            self.methods[node.name, part.name] = self._add(Place(node.name, path.stem, part.name), part)

    def reasons(self, owner: str, name: str) -> set[Reason]:
        """What this method can raise."""
        return self._from(self.methods[owner, name], set())

    def raised_in(self, *modules: str) -> set[Reason]:
        """What the functions of these modules make."""
        return {reason for place, node in self.functions.items() if place.module in modules for reason in made(node)}

    def unreached(self, *modules: str) -> list[str]:
        """Functions of these modules that make errors and that no method asked about leads to."""
        lost = [one for one, node in self.functions.items() if one.module in modules and any(made(node))]
        return sorted(f"{one.module}.{one.owner}.{one.name}" for one in lost if one not in self.reached)

    def _add(self, place: Place, node: Function) -> Place:
        self.functions[place] = node
        return place

    def _from(self, place: Place, seen: set[Place]) -> set[Reason]:
        if place in seen:
            return set()
        seen.add(place)
        self.reached.add(place)
        node = self.functions[place]
        found = set(made(node))
        for used in self._used(place, node):
            found |= self._from(used, seen)
        return found

    def _used(self, place: Place, node: Function) -> Iterator[Place]:
        own = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        own |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id not in own:
                used = self.imports.get((place.module, part.id), Place("", place.module, part.id))
                if used in self.functions:
                    yield used
            elif isinstance(part, ast.Attribute):
                owner = part.value.attr if isinstance(part.value, ast.Attribute) else getattr(part.value, "id", "")
                known = place.owner if owner == "self" else self.owners.get(owner, "")
                if (known, part.attr) in self.methods:
                    yield self.methods[known, part.attr]
                elif Place("", owner, part.attr) in self.functions:
                    yield Place("", owner, part.attr)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def made(node: Function) -> Iterator[Reason]:
    """The reasons of the errors that a function makes itself."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
            if part.func.id == "invalid_field":
                yield Reason.INVALID_FIELD
            elif part.func.id == "PagepoolError":
                for word in ast.walk(part.args[0]):
                    if isinstance(word, ast.Attribute) and word.attr in Reason.__members__:
                        yield Reason[word.attr]
