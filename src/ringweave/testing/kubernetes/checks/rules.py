"""Rules in CEL: `x-kubernetes-validations` of custom resources, and expressions of admission policies."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import cel

Schema = Mapping[str, Any]
MISSING = object()


def _is_sorted(values: list[Any]) -> bool:
    return all(one <= other for one, other in itertools.pairwise(values))


def _format(text: str, values: list[Any]) -> str:
    return text % tuple(values)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "isSorted": _is_sorted,
    "format": _format,
}
"""What Kubernetes adds to CEL for lists and texts."""
_UNBOUNDED = re.compile(r"\+\s*string\(|\bstring\((?:[^()]|\([^()]*\))*\)\s*\+")
"""A text of a number in a sum: the API server takes it to be as long as any text may be."""


@lru_cache(maxsize=1000)
def compiled(text: str) -> cel.Program:
    """The expression, ready to be evaluated.

    Raises:
        ValueError: It is no CEL.
    """
    return cel.compile(text)


def evaluate(text: str, variables: Mapping[str, Any]) -> Any:
    """The value of an expression.

    Raises:
        Exception: Of whatever kind the library has for what goes wrong in it.
    """
    context = cel.Context()
    for name, function in _FUNCTIONS.items():
        context.add_function(name, function)
    for name, value in variables.items():
        context.add_variable(name, value)
    return compiled(text).execute(context)


def problems(schema: Schema, value: Any, old: Any = MISSING, path: str = "") -> Iterator[str]:
    """Rules of the schema that the value breaks, in the API server's words; what has not changed breaks none."""
    if old is not MISSING and old == value:
        return
    for rule in schema.get("x-kubernetes-validations", ()):
        yield from _broken(rule, value, old, path)
    if isinstance(value, dict):
        for key, field in schema.get("properties", {}).items():
            if key in value:
                before = old.get(key, MISSING) if isinstance(old, dict) else MISSING
                yield from problems(field, value[key], before, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and "items" in schema:
        keys = schema.get("x-kubernetes-list-map-keys", ())
        for index, item in enumerate(value):
            yield from problems(schema["items"], item, _correlated(item, old, keys), f"{path}[{index}]")


def definition_problems(schema: Schema, path: str) -> Iterator[str]:
    """Rules of the schema that are no CEL, and messages that the API server estimates to cost too much."""
    for index, rule in enumerate(schema.get("x-kubernetes-validations", ())):
        for key in ("rule", "messageExpression"):
            try:
                compiled(rule.get(key, "true"))
            except ValueError as error:
                yield f"{path}.x-kubernetes-validations[{index}].{key}: Invalid value: compilation failed: {error}"
        if _UNBOUNDED.search(rule.get("messageExpression", "")):
            where = f"{path}.x-kubernetes-validations[{index}].messageExpression"
            yield f"{where}: Forbidden: estimated messageExpression cost exceeds budget by factor of more than 100x"
    for key, field in schema.get("properties", {}).items():
        yield from definition_problems(field, f"{path}.properties[{key}]")
    if "items" in schema:
        yield from definition_problems(schema["items"], f"{path}.items")


def _broken(rule: Mapping[str, str], value: Any, old: Any, path: str) -> Iterator[str]:
    variables = {"self": value}
    if "oldSelf" in rule["rule"]:
        if old is MISSING:
            return  # a rule about changes says nothing of what is new
        variables["oldSelf"] = old
    try:
        holds = evaluate(rule["rule"], variables)
    except Exception as error:
        yield f'{path}: Invalid value: "{_shown(value)}": rule evaluation error: {error}'
        return
    if holds is not True:
        yield f'{path}: Invalid value: "{_shown(value)}": {_message(rule, variables)}'


def _message(rule: Mapping[str, str], variables: Mapping[str, Any]) -> str:
    if "messageExpression" in rule:
        try:
            return str(evaluate(rule["messageExpression"], variables))
        except Exception:
            return rule["message"]
    return rule.get("message", f"failed rule: {rule['rule']}")


def _correlated(item: Any, old: Any, keys: tuple[str, ...]) -> Any:
    """The item of the old list with the same keys."""
    if not keys or not isinstance(old, list):
        return MISSING
    named = [item.get(key) for key in keys]
    return next((other for other in old if [other.get(key) for key in keys] == named), MISSING)


def _shown(value: Any) -> str:
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else str(value)
