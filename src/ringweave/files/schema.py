"""Keys and types of a file by pydantic, its complaints put as the house's problems.

A model here says which keys a map has; a field's `description` completes "expected ..." and its first example is what
the mend shows. What a value means is checked by whoever owns it.
"""

import typing
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ringweave.files.problems import Path, Problem, ProblemsError, closest, dotted


def _given(value: Any) -> Any:
    """A key without a value is a slip of the pen, not a way to leave the key out."""
    if value is None:
        raise PydanticCustomError("empty", "no value")
    return value


GIVEN = BeforeValidator(_given)
"""For keys that may be left out, but not left empty."""


class Entry(BaseModel):
    """A map of a file: no other keys than its own, no type made from another."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_Model = TypeVar("_Model", bound=Entry)


def read(model: type[_Model], value: Any, noun: str) -> _Model:
    """The entries of a file whose keys and types are right.

    Args:
        model: What the whole file is.
        value: What the file holds, as plain values.
        noun: What the file is called: `cluster file`.

    Raises:
        ProblemsError: Lists unknown keys, missing keys and values of the wrong type.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        teller = _Teller(model, noun)
        raise ProblemsError(tuple(map(teller.problem, teller.without_consequences(details)))) from error


class _Teller:
    """Puts pydantic's complaints about one file in the house's words."""

    def __init__(self, model: type[Entry], noun: str) -> None:
        self._model = model
        self._noun = noun

    def without_consequences(self, details: list[ErrorDetails]) -> list[ErrorDetails]:
        """A mistyped required key is both unknown and missing; only the first is worth saying."""
        mistyped = {
            (*item["loc"][:-1], key)
            for item in details
            if item["type"] == "extra_forbidden"
            for key in self._fields(item["loc"][:-1])
            if f'"{key}"' in self._suggestion(item["loc"])
        }
        return [item for item in details if item["type"] != "missing" or item["loc"] not in mistyped]

    def problem(self, item: ErrorDetails) -> Problem:
        path = self._path(item["loc"])
        key, got = str(path[-1]) if path else "", item["input"]
        if item["type"] == "extra_forbidden":
            keys = ", ".join(self._fields(path[:-1]))
            do = self._suggestion(path) or "Remove it, or write one of these keys"
            what = f"unknown key {_place(path[:-1])}"
            return Problem(path=path, what=what, got=key, expected=f"one of {keys}", do=do)
        if self._is_map(path):
            expected = f"a map with the keys {', '.join(self._fields(path))}"
            what = dotted(path) or self._noun
            return Problem(path=path, what=what, got=got, expected=expected, do="Write key: value pairs")
        description, example = self._described(path)
        if item["type"] == "missing":
            what, expected = f"missing key {_place(path[:-1])}", f"{key} ({description})"
            return Problem(path=path, what=what, got=got, expected=expected, do=f'Add "{key}: {example}"')
        named = dotted(path) if self._is_free(path) else key
        key = self._key(path)
        return Problem(path=path, what=named, got=got, expected=description, do=f'Write it like "{key}: {example}"')

    def _path(self, location: Path) -> Path:
        """Where it is in the file: pydantic adds marks of its own behind the keys of a map."""
        return tuple(part for part in location if part != "[key]")

    def _is_map(self, path: Path) -> bool:
        if not path:
            return True
        return isinstance(path[-1], int) and _model_of(self._info(path).annotation) is not None

    def _is_free(self, path: Path) -> bool:
        """It leads to an item of a list, or to a key that the author chose."""
        return path[-1] != self._key(path)

    def _key(self, path: Path) -> str:
        """The last key on the path that a model has."""
        known = [part for end, part in enumerate(path) if isinstance(part, str) and part in self._fields(path[:end])]
        return str(known[-1])

    def _described(self, path: Path) -> tuple[str, str]:
        info = self._info(path)
        return str(info.description), str((info.examples or [""])[0])

    def _info(self, path: Path) -> Any:
        """The field that the path leads to, or that holds the item or the free key at its end."""
        model, info = self._model, None
        for part in path:
            if isinstance(part, str) and model is not None and part in model.model_fields:
                info = model.model_fields[part]
                model = _model_of(info.annotation)
        return info

    def _fields(self, path: Path) -> dict[str, Any]:
        model = _model_of(self._info(path).annotation) if any(isinstance(part, str) for part in path) else self._model
        return dict(model.model_fields) if model else {}

    def _suggestion(self, path: Path) -> str:
        return closest(path[-1], self._fields(path[:-1]))


def _model_of(annotation: Any) -> type[Entry] | None:
    """The model among the arguments of `list[Model]`, `Model | None` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, Entry):
        return annotation
    return next(filter(None, map(_model_of, typing.get_args(annotation))), None)


def _place(path: Path) -> str:
    return f"in {dotted(path)}" if path else "at the top of the file"
