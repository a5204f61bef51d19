"""Prove that a refactoring changed names and places only: compare two source trees definition by definition.

    python tools/same_code.py OLD NEW [--modules FILE] [--names FILE]

Every top-level function, class, constant and statement of the old tree is compared with the definition of the new tree
that the two maps give it. Imports and docstrings are left out. A reference to a global is compared by its resolution
(module and name, through re-exports), so that `records.Decree` in one module equals `Membership` in another if the maps
say so. Everything else has to be equal: conditions, constants, defaults, decorators, order of calls and of statements.

The maps are tab-separated, with a header line. Without an option its map has no rows.

    modules: old module, new module                    modules without a row keep their name
    names:   old module, old, new                      `old` is `name`, `Class.member` or `function(parameter)`

A row for a member, parameter or local variable allows that old identifier to have become that new one wherever an
attribute, keyword, parameter or method stands, and where a string is this identifier and no more: the comparison has no
types. Local variables may be renamed without a row if the renaming is one to one within the function.
"""

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

FOLDERS = ("src", "bench", "tests", "examples")
"""Folders of a tree that hold code. Modules below `src` and `bench/ringweave_bench` have no prefix, others have."""

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_MAX_RE_EXPORTS = 20
_PATH = re.compile(r"\b[a-z_]+(?:\.[A-Za-z_0-9]+)+")


@dataclass
class Scope:
    """Names that a module, function, class or comprehension binds."""

    kind: str
    parent: "Scope | None"
    bound: set[str] = field(default_factory=set)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """(module, name in it) that an imported name stands for; None: the module itself."""
    elsewhere: set[str] = field(default_factory=set)
    """Names declared `global` or `nonlocal`."""
    declared: set[str] = field(default_factory=set)
    """Names annotated and not given a value: a class body that reads one gets that of the scope around it."""

    def find(self, name: str, *, outside: bool = False) -> "Scope | None":
        """Return the scope that binds `name` as seen from here, or None if it is a builtin.

        Args:
            name: An identifier.
            outside: Leaves this scope out.
        """
        scope: Scope | None = self.parent if outside else self
        while scope is not None:
            visible = scope.kind != "class" or scope is self
            if visible and name in scope.bound and name not in scope.elsewhere:
                return scope
            scope = scope.parent
        return None


Scopes = tuple[Scope, Scope]
"""The scope in the old tree and the scope in the new one."""


@dataclass
class Module:
    """One parsed file: its scopes by node, and its top-level definitions by name."""

    name: str
    tree: ast.Module
    scopes: dict[ast.AST, Scope] = field(default_factory=dict)
    definitions: dict[str, list[ast.stmt]] = field(default_factory=lambda: defaultdict(list))
    statements: list[ast.stmt] = field(default_factory=list)
    """Top-level statements that define no name."""
    early: set[ast.Name] = field(default_factory=set)
    """Names in a class body that are read before the body binds them: they are those of the scope around the class."""

    @property
    def scope(self) -> Scope:
        return self.scopes[self.tree]

    def find(self, name: ast.Name, scope: Scope) -> Scope | None:
        """Return the scope that binds the name of a node in `scope`, or None if it is a builtin."""
        return scope.find(name.id, outside=name in self.early)


def parse_module(name: str, source: str) -> Module:
    """Parse a file and bind every name in it to a scope."""
    module = Module(name, ast.parse(source))
    _Binder(module).visit_module()
    for statement in module.tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        if _is_left_out(statement):
            continue
        names = list(_defined_names(statement))
        for each in names:
            module.definitions[each].append(statement)
        if not names:
            module.statements.append(statement)
    return module


def _is_left_out(node: ast.AST) -> bool:
    """Tell imports, `pass` and bare strings (docstrings, of fields too), which take no part in a comparison."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)


def _defined_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, _FUNCTIONS | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from _target_names(target)


def _target_names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _target_names(each)


class _Binder:
    """Walks a module once and notes for every node that opens a scope what it binds."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def visit_module(self) -> None:
        tree = self._module.tree
        self._open(tree, Scope("module", None), tree.body)

    def _open(self, node: ast.AST, scope: Scope, children: Iterable[ast.AST]) -> None:
        self._module.scopes[node] = scope
        for child in children:
            self._visit(child, scope)

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, _FUNCTIONS | ast.Lambda):
            self._visit_function(node, scope)
        elif isinstance(node, ast.ClassDef):
            self._visit_all([*node.decorator_list, *node.bases, *node.keywords], scope)
            scope.bound.add(node.name)
            self._open(node, Scope("class", scope), node.body)
        elif isinstance(node, _COMPREHENSIONS):
            inner = Scope("comprehension", scope)
            self._visit(node.generators[0].iter, scope)
            rest = [part for each in node.generators for part in (each.target, *each.ifs)]
            rest += [each.iter for each in node.generators[1:]]
            values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            self._open(node, inner, [*rest, *values])
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None:
            self._visit(node.annotation, scope)
            if node.target.id not in scope.bound:
                scope.declared.add(node.target.id)
            scope.bound.add(node.target.id)
        else:
            self._bind(node, scope)
            self._visit_all(_in_order_of_evaluation(node), scope)

    def _visit_all(self, nodes: Iterable[ast.AST], scope: Scope) -> None:
        for node in nodes:
            self._visit(node, scope)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope) -> None:
        arguments = node.args
        if not isinstance(node, ast.Lambda):
            self._visit_all([*node.decorator_list, *filter(None, [node.returns])], scope)
        inner = Scope("function", scope)
        every = _arguments(arguments)
        self._visit_all([*arguments.defaults, *filter(None, arguments.kw_defaults)], scope)
        self._visit_all([each.annotation for each in every if each.annotation is not None], scope)
        if not isinstance(node, ast.Lambda):
            scope.bound.add(node.name)
        inner.bound.update(each.arg for each in every)
        self._open(node, inner, node.body if isinstance(node.body, list) else [node.body])

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                scope.bound.add(node.id)
                scope.declared.discard(node.id)
            elif scope.kind == "class" and node.id not in scope.bound - scope.declared:
                self._module.early.add(node)
        elif isinstance(node, ast.NamedExpr):
            while scope.kind == "comprehension" and scope.parent is not None:
                scope = scope.parent
            scope.bound.add(node.target.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            scope.bound.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            scope.bound.add(node.rest)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            scope.elsewhere.update(node.names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            _bind_imports(node, scope)


def _bind_imports(node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
    for each in node.names:
        if isinstance(node, ast.Import):
            local = each.asname or each.name.split(".")[0]
            scope.imports[local] = (each.name if each.asname else local, None)
        else:
            local = each.asname or each.name
            scope.imports[local] = (f"{node.module}", each.name)
        scope.bound.add(local)


def _in_order_of_evaluation(node: ast.AST) -> list[ast.AST]:
    """Children of a node, with the target of an assignment or a loop behind the values that it gets."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        first = [node.iter] if isinstance(node, ast.For | ast.AsyncFor) else [c for c in children if c not in targets]
        children = [*first, *targets, *(c for c in children if c not in first and c not in targets)]
    return children


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return every + [each for each in (arguments.vararg, arguments.kwarg) if each is not None]


class Tree:
    """All modules of one source tree, and what their global names resolve to."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules
        parts = [name.split(".") for name in modules]
        self._packages = {".".join(each[:length]) for each in parts for length in range(1, len(each))}
        """Packages, also those without a file of their own."""

    @classmethod
    def read(cls, root: Path) -> "Tree":
        """Parse every Python file below the code folders of `root`."""
        modules = {}
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*.py")):
                name = module_name(path.relative_to(root))
                modules[name] = parse_module(name, path.read_text(encoding="utf-8"))
        return cls(modules)

    def resolve(self, module: str, names: Sequence[str]) -> str:
        """Follow `names` from a module through re-exports.

        Returns:
            `module:name.member` where `name` is defined; else the dotted path of a module or of something outside of
            the tree.
        """
        for _ in range(_MAX_RE_EXPORTS):
            if not names:
                break
            name, *rest = names
            found = self.modules.get(module)
            if found is not None and name in found.definitions:
                return f"{module}:{'.'.join(names)}"
            imported = found.scope.imports.get(name) if found is not None else None
            if imported is not None and imported != (module, name):
                module, names = imported[0], [*filter(None, [imported[1]]), *rest]
            elif f"{module}.{name}" in self.modules or (found is None and module in self._packages):
                module, names = f"{module}.{name}", rest
            else:
                break
        return ".".join([module, *names])


def module_name(path: Path) -> str:
    """Return the dotted name of a file given relative to the root of its tree."""
    parts = list(path.with_suffix("").parts)
    if parts[0] == "src" or parts[:2] == ["bench", "ringweave_bench"]:
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass
class Renames:
    """The two maps of a refactoring."""

    modules: dict[str, str] = field(default_factory=dict)
    globals: dict[str, str] = field(default_factory=dict)
    """New bare name by `old.module:name`."""
    pairs: set[tuple[str, str]] = field(default_factory=set)
    """(old, new) of members, parameters and local variables."""
    global_pairs: set[tuple[str, str]] = field(default_factory=set)
    """(old, new) of globals, without their modules."""

    @classmethod
    def read(cls, modules: Path | None, names: Path | None) -> "Renames":
        """Read the maps; a map that is not given is empty."""
        renames = cls(modules=dict(_rows(modules)) if modules else {})
        for module, old, new in _rows(names) if names else ():
            renames.add(module, old, new)
        return renames

    def add(self, module: str, old: str, new: str) -> None:
        """Add one row of the map of names."""
        if "(" in old:
            self.pairs.add((old.rstrip(")").split("(")[1], new))
        elif "." in old:
            self.pairs.add((old.rsplit(".", 1)[1], new))
        else:
            self.globals[f"{module}:{old}"] = new
            self.global_pairs.add((old, new))

    def target(self, resolved: str) -> str:
        """Translate a resolved reference of the old tree into the new one."""
        if ":" not in resolved:
            head, _, last = resolved.rpartition(".")
            known = f"{self.modules[head]}.{last}" if head in self.modules else resolved
            return self.modules.get(resolved, known)
        module, _, name = resolved.partition(":")
        first, *more = name.split(".")
        new = self.globals.get(f"{module}:{first}", first)
        return ".".join([f"{self.modules.get(module, module)}:{new}", *more])

    def allows(self, old: str, new: str) -> bool:
        """Tell if a member, keyword or parameter may have got this name."""
        return old == new or (old, new) in self.pairs

    def allows_text(self, old: str, new: str, tree: Tree) -> bool:
        """Tell if a string of the old tree may have become this one: with new paths, or a renamed name and no more."""
        text = self.text(old, tree)
        return new == text or (text == old and (self.allows(old, new) or (old, new) in self.global_pairs))

    def text(self, old: str, tree: Tree) -> str:
        """Replace every path of a module in a string by its new one."""

        def replace(match: re.Match[str]) -> str:
            parts = match.group(0).split(".")
            for length in range(len(parts), 0, -1):
                module, rest = ".".join(parts[:length]), parts[length:]
                if module not in self.modules:
                    continue
                resolved = tree.resolve(module, rest[:1])
                if ":" in resolved:
                    return ".".join([self.target(resolved).replace(":", "."), *rest[1:]])
                return ".".join([self.modules[module], *rest])
            return match.group(0)

        return _PATH.sub(replace, old)


def _rows(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [[cell.strip() for cell in line.split("\t")[:3]] for line in lines if line.strip()]


class DifferenceError(Exception):
    """Two nodes should be alike and are not."""


class Comparison:
    """One definition of the old tree beside one of the new tree."""

    def __init__(self, old: Tree, new: Tree, renames: Renames, modules: tuple[Module, Module]) -> None:
        self._old, self._new, self._renames = old, new, renames
        self._modules = modules
        self._locals: dict[tuple[int, str], tuple[int, str]] = {}
        """New local variable, by scope and name, of an old one."""
        self._locals_back: dict[tuple[int, str], tuple[int, str]] = {}

    def check(self, old: ast.AST, new: ast.AST) -> None:
        """Compare two top-level statements.

        Raises:
            DifferenceError: They differ; the message has the lines of both.
        """
        self._check(old, new, self._modules[0].scope, self._modules[1].scope)

    def _fail(self, old: object, new: object) -> NoReturn:
        def show(node: object) -> str:
            text = ast.unparse(node) if isinstance(node, ast.AST) else repr(node)
            return f"line {getattr(node, 'lineno', '?')}: {text[:160]}"

        raise DifferenceError(f"{show(old)}\n     -> {show(new)}")

    def _check(self, old: ast.AST, new: ast.AST, here: Scope, there: Scope) -> None:
        if isinstance(old, ast.Name | ast.Attribute) and isinstance(new, ast.Name | ast.Attribute):
            self._check_reference(old, new, here, there)
            return
        if type(old) is not type(new):
            self._fail(old, new)
        if isinstance(old, ast.Constant) and isinstance(new, ast.Constant):
            self._check_constant(old, new, here, there)
            return
        outer = here, there
        opened = self._modules[0].scopes.get(old), self._modules[1].scopes.get(new)
        inner = (opened[0] or here, opened[1] or there)
        for name, value in ast.iter_fields(old):
            other = getattr(new, name)
            if isinstance(value, ast.arguments):
                self._check_arguments(value, other, outer, inner)
            elif isinstance(old, _COMPREHENSIONS) and name == "generators":
                self._check_generators(value, other, outer, inner)
            else:
                self._check_field(old, new, name, value, other, inner if self._is_inside(old, name) else outer)

    @staticmethod
    def _is_inside(node: ast.AST, name: str) -> bool:
        return isinstance(node, ast.Module) or name in ("body", "elt", "key", "value")

    def _check_generators(
        self, old: list[ast.comprehension], new: list[ast.comprehension], outer: Scopes, inner: Scopes
    ) -> None:
        """Compare the loops of a comprehension; the first one's iterable belongs to the scope around it."""
        if [each.is_async for each in old] != [each.is_async for each in new]:
            self._fail(old[0].iter, new[0].iter)
        for index, (one, two) in enumerate(zip(old, new, strict=True)):
            self._check(one.iter, two.iter, *(inner if index else outer))
            for name in ("target", "ifs"):
                self._check_field(one, two, name, getattr(one, name), getattr(two, name), inner)

    def _check_arguments(self, old: ast.arguments, new: ast.arguments, outer: Scopes, inner: Scopes) -> None:
        for name, value in ast.iter_fields(old):
            other = getattr(new, name)
            values, others = ([value], [other]) if not isinstance(value, list) else (value, other)
            if len(values) != len(others):
                self._fail(old, new)
            for one, two in zip(values, others, strict=True):
                if isinstance(one, ast.arg) and isinstance(two, ast.arg):
                    self._check_argument(one, two, outer, inner)
                elif one is None or two is None:
                    if one is not two:
                        self._fail(old, new)
                else:
                    self._check(one, two, *outer)

    def _check_argument(self, old: ast.arg, new: ast.arg, outer: Scopes, inner: Scopes) -> None:
        if not self._renames.allows(old.arg, new.arg):
            self._fail(old, new)
        self._pair(old.arg, new.arg, *inner, old, new)
        if old.annotation is not None and new.annotation is not None:
            self._check(old.annotation, new.annotation, *outer)
        elif old.annotation is not new.annotation:
            self._fail(old, new)

    def _check_field(self, old: ast.AST, new: ast.AST, name: str, value: object, other: object, scopes: Scopes) -> None:
        if name in ("ctx", "type_comment", "kind"):
            return
        if isinstance(value, list) and isinstance(other, list):
            values = [each for each in value if not (isinstance(each, ast.AST) and _is_left_out(each))]
            others = [each for each in other if not (isinstance(each, ast.AST) and _is_left_out(each))]
            if len(values) != len(others):
                self._fail(old, new)
            for one, two in zip(values, others, strict=True):
                self._check_value(old, new, name, one, two, scopes)
        else:
            self._check_value(old, new, name, value, other, scopes)

    def _check_value(self, old: ast.AST, new: ast.AST, name: str, value: object, other: object, scopes: Scopes) -> None:
        if isinstance(value, ast.AST) and isinstance(other, ast.AST):
            if type(value) is not type(other) and not hasattr(value, "lineno"):  # operators have no lines
                self._fail(old, new)
            self._check(value, other, *scopes)
        elif isinstance(value, str) and isinstance(other, str):
            self._check_identifier(old, new, name, value, other, scopes)
        elif value != other or type(value) is not type(other):
            self._fail(old, new)

    def _check_identifier(self, old: ast.AST, new: ast.AST, name: str, value: str, other: str, scopes: Scopes) -> None:
        """Compare names that stand in no Name node: of definitions, keywords, handlers, patterns, `nonlocal`."""
        if isinstance(old, _FUNCTIONS | ast.ClassDef):
            at_top = scopes[0].kind == "module"
            if at_top:
                value = self._renames.globals.get(f"{self._modules[0].name}:{value}", value)
            if scopes[0].kind == "function":
                self._pair(value, other, *scopes, old, new)
            elif value != other and (at_top or not self._renames.allows(value, other)):
                self._fail(old, new)
        elif isinstance(old, ast.keyword | ast.MatchClass):
            if not self._renames.allows(value, other):
                self._fail(old, new)
        else:
            self._pair(value, other, scopes[0].find(value) or scopes[0], scopes[1].find(other) or scopes[1], old, new)

    def _pair(self, value: str, other: str, here: Scope, there: Scope, old: ast.AST, new: ast.AST) -> None:
        """Let a local name stand for one other one, both ways."""
        if here.kind != there.kind:
            self._fail(old, new)
        if here.kind in ("module", "class"):
            if not self._renames.allows(value, other):
                self._fail(old, new)
            return
        one, two = (id(here), value), (id(there), other)
        if self._locals.setdefault(one, two) != two or self._locals_back.setdefault(two, one) != one:
            self._fail(old, new)

    def _check_constant(self, old: ast.Constant, new: ast.Constant, here: Scope, there: Scope) -> None:
        if isinstance(old.value, str) and isinstance(new.value, str):
            if self._renames.allows_text(old.value, new.value, self._old):
                return
            one, two = _quoted_annotation(old.value, here), _quoted_annotation(new.value, there)
            if one is None or two is None:
                self._fail(old, new)
            self._check(one, two, here, there)
        elif old.value != new.value or type(old.value) is not type(new.value):
            self._fail(old, new)

    def _check_reference(self, old: ast.expr, new: ast.expr, here: Scope, there: Scope) -> None:
        one, two = self._global_of(old, self._old, 0, here), self._global_of(new, self._new, 1, there)
        if one is not None and two is not None:
            if not self._is_renamed(one, two):
                self._fail(old, new)
        elif isinstance(old, ast.Attribute) and isinstance(new, ast.Attribute):
            if not self._renames.allows(old.attr, new.attr):
                self._fail(old, new)
            self._check(old.value, new.value, here, there)
        elif isinstance(old, ast.Name) and isinstance(new, ast.Name) and one is None and two is None:
            owner, other = self._modules[0].find(old, here), self._modules[1].find(new, there)
            if owner is not None and other is not None:
                self._pair(old.id, new.id, owner, other, old, new)
            elif old.id != new.id or owner is not other:
                self._fail(old, new)
        else:
            self._fail(old, new)

    def _is_renamed(self, one: str, two: str) -> bool:
        """Compare resolved references; what follows the definition is a chain of members."""
        old, new = self._renames.target(one), two
        if ":" in old and ":" in new:
            (first, *olds), (second, *news) = old.split(":")[1].split("."), new.split(":")[1].split(".")
            same = old.split(":")[0] == new.split(":")[0] and first == second and len(olds) == len(news)
            return same and all(self._renames.allows(*pair) for pair in zip(olds, news, strict=True))
        return old == new

    def _global_of(self, node: ast.expr, tree: Tree, side: int, scope: Scope) -> str | None:
        """Resolve a chain of attributes to a global; None if it begins with a local or a builtin."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        found = self._modules[side].find(node, scope)
        if found is None:
            return None
        names.reverse()
        if node.id in found.imports and not (found.kind == "module" and node.id in self._modules[side].definitions):
            module, name = found.imports[node.id]
            return tree.resolve(module, [*filter(None, [name]), *names])
        return ".".join([f"{self._modules[side].name}:{node.id}", *names]) if found.kind == "module" else None


def _quoted_annotation(text: str, scope: Scope) -> ast.expr | None:
    """Parse an annotation in quotes; None for other text: what is not in the usual form, or names a local variable."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    owners = [scope.find(node.id) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    is_local = any(each is not None and each.kind in ("function", "comprehension") for each in owners)
    is_canonical = ast.unparse(tree).replace('"', "'") == text.replace('"', "'")
    return tree if owners and is_canonical and not is_local else None


@dataclass
class Result:
    """Outcome of a comparison of two trees."""

    counts: Counter = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    """Definitions of which the old tree has several alike in modules that are one now."""


def compare(old: Tree, new: Tree, renames: Renames) -> Result:
    """Compare every definition of the old tree with its place in the new one, and find those that have no old one."""
    result = Result()
    taken: dict[str, list[str]] = defaultdict(list)
    statements: dict[str, list[tuple[Module, ast.stmt]]] = defaultdict(list)
    for module in old.modules.values():
        target = renames.modules.get(module.name, module.name)
        statements[target] += [(module, each) for each in module.statements]
        for name, bodies in module.definitions.items():
            if name == "__all__":
                continue
            goal = renames.target(f"{module.name}:{name}")
            taken[goal].append(f"{module.name}:{name}")
            _compare_definition(result, (old, new), renames, module, bodies, goal)
    for goal, sources in taken.items():
        if len(sources) > 1:
            result.merged.append(f"{goal} <- {', '.join(sources)}")
    for module in new.modules.values():
        for name in module.definitions:
            if name != "__all__" and f"{module.name}:{name}" not in taken:
                result.differences.append(f"{module.name}:{name}: not in the old tree")
        _compare_statements(result, (old, new), renames, module, statements.pop(module.name, []))
    for target, rest in statements.items():
        result.differences += [f"{target}: lost: {ast.unparse(each)[:80]}" for _, each in rest]
    return result


def _compare_definition(
    result: Result, trees: tuple[Tree, Tree], renames: Renames, module: Module, bodies: list[ast.stmt], goal: str
) -> None:
    home, _, name = goal.partition(":")
    there = trees[1].modules.get(home)
    others = there.definitions.get(name) if there is not None else None
    if there is None or not others or len(others) != len(bodies):
        result.differences.append(f"{goal}: not in the new tree, or not as often")
        return
    for body, other in zip(bodies, others, strict=True):
        try:
            Comparison(*trees, renames, (module, there)).check(body, other)
        except DifferenceError as difference:
            result.differences.append(f"{module.name} -> {goal}: {difference}")
        result.counts.update(_counts(body))


def _compare_statements(
    result: Result, trees: tuple[Tree, Tree], renames: Renames, there: Module, olds: list[tuple[Module, ast.stmt]]
) -> None:
    """Match statements that define nothing, such as the guard of a main program, each with one that is alike."""
    rest = list(there.statements)
    for module, statement in olds:
        for other in rest:
            try:
                Comparison(*trees, renames, (module, there)).check(statement, other)
            except DifferenceError:
                continue
            rest.remove(other)
            result.counts["statements"] += 1
            break
        else:
            result.differences.append(f"{there.name}: lost or changed: {ast.unparse(statement)[:80]}")
    result.differences += [f"{there.name}: new: {ast.unparse(each)[:80]}" for each in rest]


def _counts(body: ast.stmt) -> Counter:
    counts: Counter = Counter()
    for node in ast.walk(body):
        counts["functions"] += isinstance(node, _FUNCTIONS)
        counts["classes"] += isinstance(node, ast.ClassDef)
    counts["constants"] += isinstance(body, ast.Assign | ast.AnnAssign | ast.AugAssign)
    return counts


def main() -> int:
    """Compare the trees that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    for name in ("modules", "names"):
        parser.add_argument(f"--{name}", type=Path, help=f"map of {name} (tab-separated; default: no rows)")
    options = parser.parse_args()
    for path in (options.modules, options.names):
        if path is not None and not path.exists():
            parser.error(f"map {path}: no such file. Leave the option out for a map without rows")
    result = compare(Tree.read(options.old), Tree.read(options.new), Renames.read(options.modules, options.names))
    for line in result.merged:
        print(f"merged, alike: {line}")
    for line in result.differences:
        print(line)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(result.counts.items()))
    print(f"{'different: ' + str(len(result.differences)) if result.differences else 'equal'}; compared: {counts}")
    return 1 if result.differences else 0


if __name__ == "__main__":
    sys.exit(main())
