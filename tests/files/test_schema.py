"""What is said of keys and types, for maps in lists, free keys and texts in lists."""

import pytest
from pydantic import Field

from ringweave.files import yaml_files
from ringweave.files.problems import InputError


class Wheel(yaml_files.FileEntry):
    size: int = Field(description="a whole number", examples=["20"])


class Car(yaml_files.FileEntry):
    name: str = Field(description="a name", examples=["a"])
    wheels: list[Wheel] = Field(default=[], description="a list of wheels", examples=["[{size: 20}]"])
    words: dict[str, str] = Field(default={}, description="names with text", examples=["{a: b}"])
    lines: list[str] = Field(default=[], description="a list of texts", examples=["[a]"])
    note: str | None = Field(default=None, description="text", examples=["x"])


def test_what_fits_is_read() -> None:
    read = yaml_files.validate_entries(Car, {"name": "a", "wheels": [{"size": 3}], "words": {"k": "v"}}, "car file")
    assert read == Car(name="a", wheels=[Wheel(size=3)], words={"k": "v"})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "car file: 5, expected a map with the keys name, wheels, words, lines, note. Write key: value pairs."),
        ({}, 'missing key at the top of the file: {}, expected name (a name). Add "name: a".'),
        (
            {"nam": "a"},
            "unknown key at the top of the file: 'nam', expected one of name, wheels, words, lines, note. "
            'Did you mean "name"? [nam]',
        ),
        ({"name": 5}, 'name: 5, expected a name. Write it like "name: a". [name]'),
        (
            {"name": "a", "wheels": [5]},
            "wheels.0: 5, expected a map with the keys size. Write key: value pairs. [wheels.0]",
        ),
        (
            {"name": "a", "wheels": [{"size": "x"}]},
            "size: 'x', expected a whole number. Write it like \"size: 20\". [wheels.0.size]",
        ),
        (
            {"name": "a", "wheels": [{}]},
            'missing key in wheels.0: {}, expected size (a whole number). Add "size: 20". [wheels.0.size]',
        ),
        (
            {"name": "a", "words": {"k": 1}},
            'words.k: 1, expected names with text. Write it like "words: {a: b}". [words.k]',
        ),
        (
            {"name": "a", "lines": ["a", 1]},
            'lines.1: 1, expected a list of texts. Write it like "lines: [a]". [lines.1]',
        ),
        ({"name": "a", "note": None}, 'note: None, expected text. Write it like "note: x". [note]'),
    ],
)
def test_what_does_not_fit_is_named_with_its_mend(value: object, text: str) -> None:
    with pytest.raises(InputError) as caught:
        yaml_files.validate_entries(Car, value, "car file")
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
