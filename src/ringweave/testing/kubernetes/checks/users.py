"""Who asks, what the roles allow them, and the reviews that ask so."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ringweave.testing.kubernetes.server.store import Store

MASTERS = "system:masters"
_RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """Somebody who showed a token."""

    name: str
    groups: tuple[str, ...] = ()

    def info(self) -> dict[str, Any]:
        """As reviews and policies see them."""
        return {"username": self.name, "groups": list(self.groups)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """What somebody wants to do."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


class Users:
    """Tokens, and the roles in the store."""

    def __init__(self, store: Store) -> None:
        """Nobody is known at first."""
        self._store = store
        self._by_token: dict[str, User] = {}

    def add(self, name: str, *groups: str) -> str:
        """A token for somebody."""
        token = secrets.token_urlsafe(16)
        self._by_token[token] = User(name=name, groups=(*groups, "system:authenticated"))
        return token

    def of(self, authorization: str) -> User | None:
        """Who shows this header; None: nobody whom we know."""
        kind, _, token = authorization.partition(" ")
        return self._by_token.get(token) if kind.lower() == "bearer" else None

    def may(self, user: User, wanted: Attributes) -> bool:
        """The roles allow it."""
        if MASTERS in user.groups:
            return True
        return any(_allows(rule, wanted) for rule in self._rules(user, wanted.namespace))

    def _rules(self, user: User, namespace: str) -> Iterator[Mapping[str, Any]]:
        bound = [(item.body, "") for _, item in self._store.all((_RBAC, "clusterrolebindings"))]
        if namespace:
            of_namespace = self._store.all((_RBAC, "rolebindings"))
            bound += [(item.body, namespace) for (where, _), item in of_namespace if where == namespace]
        for binding, where in bound:
            if any(_is_of(subject, user) for subject in binding.get("subjects") or ()):
                role = binding["roleRef"]
                key = (where, role["name"]) if role["kind"] == "Role" else ("", role["name"])
                found = self._store.get((_RBAC, role["kind"].lower() + "s"), key)
                yield from (found.body.get("rules") or ()) if found else ()

    def review(self, kind: str, body: dict[str, Any], user: User) -> dict[str, Any]:
        """The answer to a review."""
        if kind == "SelfSubjectReview":
            return {**body, "status": {"userInfo": user.info()}}
        spec = body["spec"]
        asked = User(name=spec.get("user", ""), groups=tuple(spec.get("groups") or ()))
        who = user if kind == "SelfSubjectAccessReview" else asked
        named = spec.get("resourceAttributes", {})
        known = {key: named[key] for key in ("verb", "group", "resource", "namespace", "name") if key in named}
        is_allowed = self.may(who, Attributes(**{"verb": "", "group": "", "resource": "", **known}))
        reason = "" if is_allowed else "no rule of RBAC matched"
        return {**body, "status": {"allowed": is_allowed, "reason": reason}}


def _allows(rule: Mapping[str, Any], wanted: Attributes) -> bool:
    names = rule.get("resourceNames") or ()
    return (
        _has(rule.get("verbs"), wanted.verb)
        and _has(rule.get("apiGroups"), wanted.group)
        and _has(rule.get("resources"), wanted.resource)
        and (not names or wanted.name in names)
    )


def _has(allowed: Any, value: str) -> bool:
    return "*" in (allowed or ()) or value in (allowed or ())


def _is_of(subject: Mapping[str, Any], user: User) -> bool:
    if subject["kind"] == "Group":
        return subject["name"] in user.groups
    if subject["kind"] == "ServiceAccount":
        return user.name == f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
    return subject["name"] == user.name
