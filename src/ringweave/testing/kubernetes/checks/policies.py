"""ValidatingAdmissionPolicies with their bindings; only expressions over object, oldObject, request and variables."""

from collections.abc import Iterator, Mapping
from typing import Any

from ringweave.testing.kubernetes.checks import rules
from ringweave.testing.kubernetes.checks.users import User
from ringweave.testing.kubernetes.server.refusing import Refused
from ringweave.testing.kubernetes.server.resources import Resource
from ringweave.testing.kubernetes.server.store import Object, Store

_GROUP = "admissionregistration.k8s.io"


def check(store: Store, resource: Resource, operation: str, user: User, body: Object, old: Object | None) -> None:
    """Refuse what a bound policy forbids.

    Raises:
        Refused: With the policy's message.
    """
    bound = {item.body["spec"]["policyName"] for _, item in store.all((_GROUP, "validatingadmissionpolicybindings"))}
    for (_, name), item in store.all((_GROUP, "validatingadmissionpolicies")):
        spec = item.body["spec"]
        if name in bound and _is_about(spec, resource, operation):
            for message in _broken(spec, operation, user, body, old):
                what = f"{resource.plural}.{resource.group}"
                which = f'{what} "{body["metadata"].get("name", "")}"'
                text = f"{which} is forbidden: ValidatingAdmissionPolicy '{name}' denied request: {message}"
                raise Refused(403 if spec.get("reason") == "Forbidden" else 422, "Invalid", text)


def _is_about(spec: Mapping[str, Any], resource: Resource, operation: str) -> bool:
    return any(
        {"*", operation} & set(rule["operations"])
        and {"*", resource.group} & set(rule["apiGroups"])
        and {"*", resource.plural} & set(rule["resources"])
        for rule in spec["matchConstraints"]["resourceRules"]
    )


def _broken(spec: Mapping[str, Any], operation: str, user: User, body: Object, old: Object | None) -> Iterator[str]:
    request = {"operation": operation, "userInfo": user.info(), "namespace": body["metadata"].get("namespace", "")}
    known: dict[str, Any] = {"object": body, "oldObject": old, "request": request}
    variables: dict[str, Any] = {}
    for item in spec.get("variables", ()):
        variables[item["name"]] = rules.evaluate(item["expression"], {**known, "variables": variables})
    known["variables"] = variables
    for condition in spec.get("matchConditions", ()):
        if rules.evaluate(condition["expression"], known) is not True:
            return
    for validation in spec["validations"]:
        try:
            holds = rules.evaluate(validation["expression"], known)
        except Exception as error:
            yield f"expression '{validation['expression']}' resulted in error: {error}"
            continue
        if holds is not True:
            yield _message(validation, known)


def _message(validation: Mapping[str, str], known: Mapping[str, Any]) -> str:
    if "messageExpression" in validation:
        return str(rules.evaluate(validation["messageExpression"], known))
    return validation.get("message", f"failed expression: {validation['expression']}")
