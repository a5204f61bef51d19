"""Users, roles and access reviews of the fake API server."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes.kubernetes.object_store import ObjectStore

MASTERS_GROUP = "system:masters"
RBAC_GROUP = "rbac.authorization.k8s.io"


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """User with a known token."""

    name: str
    groups: tuple[str, ...] = ()

    def info(self) -> dict[str, Any]:
        """Return the user in the form of reviews and policies."""
        return {"username": self.name, "groups": list(self.groups)}


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessAttributes:
    """Requested access."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


class UserDirectory:
    """Tokens of users, and the roles in the store."""

    def __init__(self, store: ObjectStore) -> None:
        """Start without users."""
        self._store = store
        self._by_token: dict[str, User] = {}

    def add_token(self, name: str, *groups: str) -> str:
        """Add a user and return a token."""
        token = secrets.token_urlsafe(16)
        self._by_token[token] = User(name=name, groups=(*groups, "system:authenticated"))
        return token

    def find_user(self, authorization: str) -> User | None:
        """Return the user of an Authorization header; None if unknown."""
        kind, _, token = authorization.partition(" ")
        return self._by_token.get(token) if kind.lower() == "bearer" else None

    def is_allowed(self, user: User, wanted: AccessAttributes) -> bool:
        """Return whether the roles allow the access."""
        if MASTERS_GROUP in user.groups:
            return True
        return any(_rule_allows(rule, wanted) for rule in self._rules(user, wanted.namespace))

    def _rules(self, user: User, namespace: str) -> Iterator[Mapping[str, Any]]:
        bound = [(item.body, "") for _, item in self._store.list_objects((RBAC_GROUP, "clusterrolebindings"))]
        if namespace:
            of_namespace = self._store.list_objects((RBAC_GROUP, "rolebindings"))
            bound += [(item.body, namespace) for (where, _), item in of_namespace if where == namespace]
        for binding, where in bound:
            if any(_is_subject(subject, user) for subject in binding.get("subjects") or ()):
                role = binding["roleRef"]
                key = (where, role["name"]) if role["kind"] == "Role" else ("", role["name"])
                found = self._store.get((RBAC_GROUP, role["kind"].lower() + "s"), key)
                yield from (found.body.get("rules") or ()) if found else ()

    def answer_review(self, kind: str, body: dict[str, Any], user: User) -> dict[str, Any]:
        """Return the answer to a review."""
        if kind == "SelfSubjectReview":
            return {**body, "status": {"userInfo": user.info()}}
        spec = body["spec"]
        named_user = User(name=spec.get("user", ""), groups=tuple(spec.get("groups") or ()))
        subject = user if kind == "SelfSubjectAccessReview" else named_user
        named = spec.get("resourceAttributes", {})
        known = {key: named[key] for key in ("verb", "group", "resource", "namespace", "name") if key in named}
        is_allowed = self.is_allowed(subject, AccessAttributes(**{"verb": "", "group": "", "resource": "", **known}))
        reason = "" if is_allowed else "no rule of RBAC matched"
        return {**body, "status": {"allowed": is_allowed, "reason": reason}}


def _rule_allows(rule: Mapping[str, Any], wanted: AccessAttributes) -> bool:
    names = rule.get("resourceNames") or ()
    return (
        _includes(rule.get("verbs"), wanted.verb)
        and _includes(rule.get("apiGroups"), wanted.group)
        and _includes(rule.get("resources"), wanted.resource)
        and (not names or wanted.name in names)
    )


def _includes(allowed: Any, value: str) -> bool:
    return "*" in (allowed or ()) or value in (allowed or ())


def _is_subject(subject: Mapping[str, Any], user: User) -> bool:
    if subject["kind"] == "Group":
        return subject["name"] in user.groups
    if subject["kind"] == "ServiceAccount":
        return user.name == f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
    return subject["name"] == user.name
