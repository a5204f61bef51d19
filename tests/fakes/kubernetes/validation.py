"""Checks of objects: structural schemas, CEL rules, admission policies, Pod Security Standard `restricted`."""

import functools
import itertools
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tests.fakes.kubernetes.api_failures import ApiFailure
from tests.fakes.kubernetes.object_store import Object, ObjectStore
from tests.fakes.kubernetes.resources import ApiResource
from tests.fakes.kubernetes.users import User

if TYPE_CHECKING:
    import cel  # brings a command line, whose imports take a second: functions import it

ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"


def check_pod_security(namespace: Mapping[str, Any], pod: Mapping[str, Any]) -> None:
    """Refuse a Pod that the Pod Security Standard of its namespace forbids.

    Raises:
        ApiFailure: The Pod violates the standard.
    """
    if (namespace["metadata"].get("labels") or {}).get(ENFORCE_LABEL) != "restricted":
        return
    found = [problem for each in pod["spec"]["containers"] for problem in _container_problems(pod["spec"], each)]
    if found:
        name = pod["metadata"]["name"]
        text = f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {", ".join(found)}'
        raise ApiFailure(403, "Forbidden", text, name=name, kind="pods")


def _container_problems(spec: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext") or {}
    whole = {**(spec.get("securityContext") or {}), **own}
    of, of_pod = f'(container "{container["name"]}" must set', f'(pod or container "{container["name"]}" must set'
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"allowPrivilegeEscalation != false {of} securityContext.allowPrivilegeEscalation=false)"
    if "ALL" not in (own.get("capabilities") or {}).get("drop", ()):
        yield f'unrestricted capabilities {of} securityContext.capabilities.drop=["ALL"])'
    if whole.get("runAsNonRoot") is not True:
        yield f"runAsNonRoot != true {of_pod} securityContext.runAsNonRoot=true)"
    if (whole.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f'seccompProfile {of_pod} securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost")'


RuleSchema = Mapping[str, Any]
MISSING = object()


def _is_sorted(values: list[Any]) -> bool:
    return all(one <= other for one, other in itertools.pairwise(values))


def _format(text: str, values: list[Any]) -> str:
    return text % tuple(values)


_CEL_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "isSorted": _is_sorted,
    "format": _format,
}
"""Kubernetes' additions to CEL for lists and texts."""
_UNBOUNDED_TEXT = re.compile(r"\+\s*string\(|\bstring\((?:[^()]|\([^()]*\))*\)\s*\+")
"""Concatenation with the text of a number: the API server estimates it to be as long as any text may be."""


@lru_cache(maxsize=1000)
def compile_cel(text: str) -> "cel.Program":
    """Compile an expression.

    Raises:
        ValueError: The text is no CEL.
    """
    import cel

    return cel.compile(text)


def evaluate_cel(text: str, variables: Mapping[str, Any]) -> Any:
    """Return the value of an expression.

    Raises:
        Exception: Any error of the library.
    """
    import cel

    context = cel.Context()
    for name, function in _CEL_FUNCTIONS.items():
        context.add_function(name, function)
    for name, value in variables.items():
        context.add_variable(name, value)
    return compile_cel(text).execute(context)


def rule_problems(schema: RuleSchema, value: Any, old: Any = MISSING, path: str = "") -> Iterator[str]:
    """Yield violations of the schema's rules, with the API server's texts; unchanged values violate none."""
    if old is not MISSING and old == value:
        return
    for rule in schema.get("x-kubernetes-validations", ()):
        yield from _broken_rule(rule, value, old, path)
    if isinstance(value, dict):
        for key, field in schema.get("properties", {}).items():
            if key in value:
                before = old.get(key, MISSING) if isinstance(old, dict) else MISSING
                yield from rule_problems(field, value[key], before, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and "items" in schema:
        keys = schema.get("x-kubernetes-list-map-keys", ())
        for index, item in enumerate(value):
            yield from rule_problems(schema["items"], item, _correlated_item(item, old, keys), f"{path}[{index}]")


def rule_definition_problems(schema: RuleSchema, path: str) -> Iterator[str]:
    """Yield rules that are no CEL, and messages whose cost the API server estimates to be too high."""
    for index, rule in enumerate(schema.get("x-kubernetes-validations", ())):
        for key in ("rule", "messageExpression"):
            try:
                compile_cel(rule.get(key, "true"))
            except ValueError as error:
                yield f"{path}.x-kubernetes-validations[{index}].{key}: Invalid value: compilation failed: {error}"
        if _UNBOUNDED_TEXT.search(rule.get("messageExpression", "")):
            where = f"{path}.x-kubernetes-validations[{index}].messageExpression"
            yield f"{where}: Forbidden: estimated messageExpression cost exceeds budget by factor of more than 100x"
    for key, field in schema.get("properties", {}).items():
        yield from rule_definition_problems(field, f"{path}.properties[{key}]")
    if "items" in schema:
        yield from rule_definition_problems(schema["items"], f"{path}.items")


def _broken_rule(rule: Mapping[str, Any], value: Any, old: Any, path: str) -> Iterator[str]:
    variables = {"self": value}
    if rule.get("optionalOldSelf"):
        import cel

        variables["oldSelf"] = cel.OptionalValue.none() if old is MISSING else cel.OptionalValue.of(True)
    elif "oldSelf" in rule["rule"]:
        if old is MISSING:
            return  # a transition rule does not apply to a new value
        variables["oldSelf"] = old
    try:
        holds = evaluate_cel(rule["rule"], variables)
    except Exception as error:
        yield f'{path}: Invalid value: "{_format_value(value)}": rule evaluation error: {error}'
        return
    if holds is not True:
        yield f'{path}: Invalid value: "{_format_value(value)}": {_rule_message(rule, variables)}'


def _rule_message(rule: Mapping[str, Any], variables: Mapping[str, Any]) -> str:
    if "messageExpression" in rule:
        try:
            return str(evaluate_cel(rule["messageExpression"], variables))
        except Exception:
            return rule["message"]
    return rule.get("message", f"failed rule: {rule['rule']}")


def _correlated_item(item: Any, old: Any, keys: tuple[str, ...]) -> Any:
    """Return the item of the old list with the same keys."""
    if not keys or not isinstance(old, list):
        return MISSING
    named = [item.get(key) for key in keys]
    return next((other for other in old if [other.get(key) for key in keys] == named), MISSING)


def _format_value(value: Any) -> str:
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else str(value)


_ADMISSION_GROUP = "admissionregistration.k8s.io"


def check_admission_policies(
    store: ObjectStore, resource: ApiResource, operation: str, user: User, body: Object, old: Object | None
) -> None:
    """Refuse an object that a bound policy forbids.

    Raises:
        ApiFailure: The policy is violated; it has the policy's message.
    """
    bound = {
        item.body["spec"]["policyName"]
        for _, item in store.list_objects((_ADMISSION_GROUP, "validatingadmissionpolicybindings"))
    }
    for (_, name), item in store.list_objects((_ADMISSION_GROUP, "validatingadmissionpolicies")):
        spec = item.body["spec"]
        if name in bound and _applies_to(spec, resource, operation):
            for message in _broken_validations(spec, operation, user, body, old):
                what = f"{resource.plural}.{resource.group}"
                which = f'{what} "{body["metadata"].get("name", "")}"'
                text = f"{which} is forbidden: ValidatingAdmissionPolicy '{name}' denied request: {message}"
                raise ApiFailure(403 if spec.get("reason") == "Forbidden" else 422, "Invalid", text)


def _applies_to(spec: Mapping[str, Any], resource: ApiResource, operation: str) -> bool:
    return any(
        {"*", operation} & set(rule["operations"])
        and {"*", resource.group} & set(rule["apiGroups"])
        and {"*", resource.plural} & set(rule["resources"])
        for rule in spec["matchConstraints"]["resourceRules"]
    )


def _broken_validations(
    spec: Mapping[str, Any], operation: str, user: User, body: Object, old: Object | None
) -> Iterator[str]:
    request = {"operation": operation, "userInfo": user.info(), "namespace": body["metadata"].get("namespace", "")}
    known: dict[str, Any] = {"object": body, "oldObject": old, "request": request}
    variables: dict[str, Any] = {}
    for item in spec.get("variables", ()):
        variables[item["name"]] = evaluate_cel(item["expression"], {**known, "variables": variables})
    known["variables"] = variables
    for condition in spec.get("matchConditions", ()):
        if evaluate_cel(condition["expression"], known) is not True:
            return
    for validation in spec["validations"]:
        try:
            holds = evaluate_cel(validation["expression"], known)
        except Exception as error:
            yield f"expression '{validation['expression']}' resulted in error: {error}"
            continue
        if holds is not True:
            yield _validation_message(validation, known)


def _validation_message(validation: Mapping[str, str], known: Mapping[str, Any]) -> str:
    if "messageExpression" in validation:
        return str(evaluate_cel(validation["messageExpression"], known))
    return validation.get("message", f"failed expression: {validation['expression']}")


_JSON_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
METADATA_KEYS = ("apiVersion", "kind", "metadata")


def fill_defaults(schema: RuleSchema, value: Any) -> Any:
    """Return the value with defaults filled in."""
    if isinstance(value, dict):
        filled = dict(value)
        for key, field in schema.get("properties", {}).items():
            if key not in filled and "default" in field:
                filled[key] = field["default"]
            if key in filled:
                filled[key] = fill_defaults(field, filled[key])
        return filled
    if isinstance(value, list) and "items" in schema:
        return [fill_defaults(schema["items"], item) for item in value]
    return value


def prune_unknown(schema: RuleSchema, value: Any, *, unknown: list[str], path: str = "", is_root: bool = False) -> Any:
    """Return the value without fields that the schema does not know; their paths are added to `unknown`."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict) and (schema.get("type") == "object"):
        kept = {}
        fields, free = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            if is_root and key in METADATA_KEYS:
                kept[key] = item
            elif key in fields:
                kept[key] = prune_unknown(fields[key], item, unknown=unknown, path=where)
            elif isinstance(free, dict):
                kept[key] = prune_unknown(free, item, unknown=unknown, path=where)
            else:
                unknown.append(where)
        return kept
    if isinstance(value, list) and "items" in schema:
        return [
            prune_unknown(schema["items"], item, unknown=unknown, path=f"{path}[{index}]")
            for index, item in enumerate(value)
        ]
    return value


def schema_problems(schema: RuleSchema, value: Any, path: str = "") -> Iterator[str]:
    """Yield the errors of the value, with the API server's texts."""
    kind = schema.get("type")
    if value is None:
        if not schema.get("nullable"):
            yield f'{path}: Invalid value: "null": {path} in body must be of type {kind}: "null"'
        return
    if kind and not _has_type(kind, value):
        name = _type_name(value)
        yield f'{path}: Invalid value: "{name}": {path} in body must be of type {kind}: "{name}"'
        return
    if isinstance(value, dict):
        yield from _object_problems(schema, value, path)
    elif isinstance(value, list):
        yield from _list_problems(schema, value, path)
    else:
        yield from _scalar_problems(schema, value, path)


def _object_problems(schema: RuleSchema, value: dict[str, Any], path: str) -> Iterator[str]:
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{_join_path(path, key)}: Required value"
    for key, item in value.items():
        field = schema.get("properties", {}).get(key)
        if field is not None:
            yield from schema_problems(field, item, _join_path(path, key))


def _list_problems(schema: RuleSchema, value: list[Any], path: str) -> Iterator[str]:
    if len(value) > schema.get("maxItems", len(value)):
        yield f"{path}: Too many: {len(value)}: must have at most {schema['maxItems']} items"
    if len(value) < schema.get("minItems", 0):
        yield f"{path}: Invalid value: {len(value)}: {path} in body should have at least {schema['minItems']} items"
    for index, item in enumerate(value):
        yield from schema_problems(schema.get("items", {}), item, f"{path}[{index}]")
    if schema.get("x-kubernetes-list-type") == "map":
        keys = schema["x-kubernetes-list-map-keys"]
        seen = set()
        for index, item in enumerate(value):
            named = tuple(item.get(key) if isinstance(item, dict) else None for key in keys)
            if named in seen:
                yield f"{path}[{index}]: Duplicate value: {dict(zip(keys, named, strict=True))}"
            seen.add(named)


def _scalar_problems(schema: RuleSchema, value: Any, path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(f'"{item}"' for item in schema["enum"])
        yield f'{path}: Unsupported value: "{value}": supported values: {allowed}'
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{path}: Too long: may not be more than {schema['maxLength']} bytes"
        if len(value) < schema.get("minLength", 0):
            at_least = f"should be at least {schema['minLength']} chars long"
            yield f'{path}: Invalid value: "{value}": {path} in body {at_least}'
        if "pattern" in schema and not re.search(_to_python_pattern(schema["pattern"]), value, re.ASCII):
            yield f"{path}: Invalid value: \"{value}\": {path} in body should match '{schema['pattern']}'"
    elif not isinstance(value, bool):
        if value < schema.get("minimum", value):
            least = f"should be greater than or equal to {schema['minimum']}"
            yield f"{path}: Invalid value: {value}: {path} in body {least}"
        if value > schema.get("maximum", value):
            most = f"should be less than or equal to {schema['maximum']}"
            yield f"{path}: Invalid value: {value}: {path} in body {most}"


def schema_definition_problems(schema: RuleSchema, path: str) -> Iterator[str]:
    """Yield the reasons for which a schema is not structural."""
    if "type" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        yield f"{path}.type: Required value: must not be empty for specified object fields"
    for key, field in schema.get("properties", {}).items():
        yield from schema_definition_problems(field, f"{path}.properties[{key}]")
    if schema.get("type") == "array":
        if "items" not in schema:
            yield f"{path}.items: Required value: must be specified"
            return
        yield from schema_definition_problems(schema["items"], f"{path}.items")
        for key in schema.get("x-kubernetes-list-map-keys", ()):
            item = schema["items"]
            if key not in item.get("required", ()) and "default" not in item["properties"][key]:
                yield f"{path}.items.properties[{key}].default: Required value: this property is in list-map-keys"
    if "default" in schema:
        yield from schema_problems(schema, schema["default"], f"{path}.default")


def _has_type(kind: str, value: Any) -> bool:
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _JSON_TYPES[kind])


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return names.get(type(value), "null")


def _join_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _to_python_pattern(pattern: str) -> str:
    """Convert a pattern of the API server (RE2), whose character categories Python does not know."""
    return _CATEGORY_PATTERN.sub(lambda match: _category_ranges(match[1]), pattern)


@functools.cache
def _category_ranges(category: str) -> str:
    """Return the characters of a category, as ranges for a character class."""
    points = [point for point in range(sys.maxunicode + 1) if unicodedata.category(chr(point))[0] == category]
    runs = itertools.groupby(enumerate(points), lambda pair: pair[1] - pair[0])
    ranges = ([point for _, point in run] for _, run in runs)
    return "".join(rf"\U{each[0]:08x}-\U{each[-1]:08x}" for each in ranges)


_CATEGORY_PATTERN = re.compile(r"\\p\{([CZ])\}")
