"""Hundreds of ways to write a wrong cluster file, made from a good one; each is wrong by construction.

A mutation says where it is wrong before the file is read, so that one which leaves the file legal fails the test.
"""

import copy
import functools
import io
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ringweave import topology
from ringweave.errors import ClusterError
from tests import effort

GOOD = {
    "name": "lab",
    "nodes": [
        {
            "name": "a0",
            "switch": "r0",
            "address": "10.0.0.1",
            "nics": [
                {"name": "eth0", "rate": "400Mbit/s", "numa": 0, "rdma": True},
                {"name": "eth1", "rate": "1Gbit/s", "numa": 1, "rdma": False},
            ],
            "devices": [{"kind": "cpu", "speed": 1.5, "numa": 0}, {"kind": "cuda", "speed": 2.0, "numa": 1}],
        },
        {"name": "b", "switch": "r1", "nic": "400Mbit/s", "devices": 2, "count": 3},
        {"name": "c0", "switch": "r1", "address": "10.0.0.2", "nic": "400Mbit/s", "devices": 1},
    ],
    "switches": [{"name": "r0", "uplink": "200Mbit/s"}, {"name": "r1", "uplink": "300Mbit/s", "parent": "r0"}],
    "latency": "50us",
}
NODE_KEYS = {"name", "switch", "address", "nic", "nics", "devices", "count"}
KEYS = {
    (): {"name", "nodes", "switches", "latency"},
    ("nodes", 0): NODE_KEYS,
    ("nodes", 1): NODE_KEYS,
    ("nodes", 0, "nics", 0): {"name", "rate", "numa", "rdma"},
    ("nodes", 0, "devices", 1): {"kind", "speed", "numa"},
    ("switches", 1): {"name", "uplink", "parent"},
}
"""One map of each kind, with the keys that it may have."""
NEEDED = {"name", "nodes", "switches", "nic", "nics", "devices", "rate", "uplink"}
"""Keys without which the good file is wrong (switches, because nodes refer to them); all others may be left out."""
TEXT = [5, 0.5, True, None, [], {}, ["a"], ""]
NUMBER = ["1", True, None, [], {}, -1, -0.5]
LIST = [5, 0.5, True, None, {}, "text", [5], ["text"], [[]], [None]]
WRONG_VALUES = {
    "name": [*TEXT, "a b", "a/b", "a->b", "-a", "core", "é", "x" * 300, "a\nb", "\x1b[31m", "..", " a"],
    "nodes": [*LIST, []],
    "switches": LIST,
    "latency": [*TEXT, "50", "50 years", "-1us", "nanus", "1e400s", "inf", "2h", "us", "3601s"],
    "switch": [*TEXT, "r9", "R0", "a0", "10.0.0.1"],
    "parent": [*TEXT, "r9", "r1", "R0", "b-0"],
    "address": [
        *TEXT,
        "10.0.0",
        "10.0.0.256",
        "host",
        "0.0.0.0",
        "224.0.0.1",
        "10.0.0.1/24",
        "fe80::1%eth0",
        "10.0.0.2",
        "::",
        "http://a",
    ],
    "nics": [*LIST, []],
    "devices": ["2", 2.5, True, None, {}, 0, -1, 1025, 10**30, [], [2], ["cpu"], [None]],
    "count": [*NUMBER, 2.5, 0, 100_001, 10**30, "many"],
    "rate": [
        *TEXT,
        "400",
        "400MB",
        "400MB/s",
        "400mbit/s",
        "0bit/s",
        "-5Mbit/s",
        "nanMbit/s",
        "infbit/s",
        "1e400bit/s",
        "1e300Tbit/s",
        "Mbit/s",
        "400 Mbit",
        "fast",
        "4,5Gbit/s",
        "0.01bit/s",
    ],
    "numa": ["0", True, [], {}, -1, 0.5, 10**30, None],
    "rdma": ["true", "yes", 1, 0.5, None, [], {}],
    "kind": [*TEXT, "gpu", "CPU", "cpus"],
    "speed": [*NUMBER, 0, float("nan"), float("inf"), float("-inf"), 10**30, 1e-9, "fast"],
}
WRONG_VALUES["nic"] = WRONG_VALUES["uplink"] = WRONG_VALUES["rate"]
HARMLESS = {(): ["core"], ("nodes", 0, "nics", 0): ["core"], ("nodes", 1): ["core"]}
"""Names that are wrong elsewhere: a cluster and a NIC may be called core, and so may nodes that count makes core-0."""


@dataclass(frozen=True)
class Wrong:
    """A wrong file: its content, and what its error must name."""

    label: str
    content: bytes
    named: str


def dumped(tree) -> str:
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(tree, stream)
    return stream.getvalue()


def at(tree, path):
    for part in path:
        tree = tree[part]
    return tree


def dotted(path) -> str:
    return ".".join(map(str, path))


def changed(path, change, named: str, label: str) -> Wrong:
    """The good file with `change` done to the map or list at the path."""
    tree = copy.deepcopy(GOOD)
    change(at(tree, path))
    return Wrong(f"{label} {dotted(path)}", dumped(tree).encode(), named)


def dropped_keys() -> Iterator[Wrong]:
    for path in KEYS:
        for key in NEEDED & at(GOOD, path).keys():
            named = "switch" if key == "switches" else key
            yield changed(path, lambda entry, key=key: entry.pop(key), named, f"drop {key} of")


def renamed(path, key: str, typo: str) -> Wrong:
    def rename(entry):
        entry[typo] = entry.pop(key)

    return changed(path, rename, typo, f"{typo} for {key} of")


def mistyped_keys() -> Iterator[Wrong]:
    for path, allowed in KEYS.items():
        for key in at(GOOD, path):
            for typo in {key[1:], key[:-1], key + "x", key.upper(), key[1] + key[0] + key[2:], f"my_{key}"} - allowed:
                yield renamed(path, key, typo)


def wrong_values() -> Iterator[Wrong]:
    for path in KEYS:
        for key in at(GOOD, path):
            for value in WRONG_VALUES[key]:
                if key == "name" and value in HARMLESS.get(path, []):
                    continue
                named = key if path else ""
                yield changed(
                    path,
                    lambda entry, key=key, value=value: entry.update({key: value}),
                    named,
                    f"{key}={value!r:.40} of",
                )


def duplicates() -> Iterator[Wrong]:
    for path in (("nodes",), ("switches",), ("nodes", 0, "nics")):
        for index in range(len(at(GOOD, path))):
            yield changed(
                path, lambda items, index=index: items.append(copy.deepcopy(items[index])), "name", f"repeat {index} of"
            )
    for path, name in [(("nodes", 2), "a0"), (("nodes", 2), "b-1"), (("nodes", 0), "r0"), (("switches", 1), "A0")]:
        yield changed(path, lambda entry, name=name: entry.update(name=name), "name", f"again {name} at")


def contradictions() -> Iterator[Wrong]:
    changes = {
        "nics": (("nodes", 0), {"nic": "1Gbit/s"}),
        "nodes.1.address": (("nodes", 1), {"address": "10.0.0.9"}),
        "nodes.0.address": (("nodes", 0), {"count": 2}),
        "loop r0 -> r1 -> r0": (("switches", 0), {"parent": "r1"}),
        "loop r0 -> r0": (("switches", 0), {"parent": "r0"}),
        "switch of node b-0": (("switches", 1), {"name": "r3"}),
        "100000 nodes in all": (("nodes", 1), {"count": 99_999}),
    }
    for named, (path, update) in changes.items():
        yield changed(path, lambda entry, update=update: entry.update(update), named, f"{update} in")
    yield changed(
        ("switches",), lambda items: items.append({"name": "r2", "uplink": "1Gbit/s"}), "r2", "idle switch in"
    )


def whole_files() -> Iterator[Wrong]:
    for text in ("", " \n", "# nothing\n", "---\n", "null", "~", "5", "text", "true", "[]", "{}", "- a\n- b\n"):
        yield Wrong(f"only {text!r}", text.encode(), "cluster file" if text != "{}" else "missing key")
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    yield Wrong("alias bomb", bomb.encode(), "alias")
    yield Wrong("alias to itself", b"name: &a [*a]\n", "alias")
    yield Wrong("deep nesting", b"name: " + b"[" * 1000, "a few levels")
    yield Wrong("two documents", dumped(GOOD).encode() + b"---\n" + dumped(GOOD).encode(), "another document")
    yield Wrong("UTF-16", dumped(GOOD).encode("utf-16"), "UTF-8")


def truncations() -> Iterator[Wrong]:
    """A JSON text is YAML too, and every one of its beginnings lacks the last bracket."""
    text = json.dumps(GOOD, indent=1)
    for length in range(1, len(text), 11):
        yield Wrong(f"first {length} characters", text[:length].encode(), "YAML")


def broken_lines() -> Iterator[Wrong]:
    lines = dumped(GOOD).splitlines()
    for index, line in enumerate(lines):
        if not re.fullmatch(r" *\w+: \S.*", line):
            continue
        key, value = line.split(": ", maxsplit=1)
        for label, replacement, named in (
            ("key twice", f"{line}\n{line}", "twice"),
            ("tab", f"\t{line}", "YAML"),
            ("control character", f"{key}: \x07{value}", "character"),
            ("open bracket", f"{key}: [{value}", "YAML"),
            ("open quote", f'{key}: "{value}', "YAML"),
            ("reserved character", f"{key}: @{value}", "YAML"),
            ("unknown alias", f"{key}: *{value}", "YAML"),
            ("tag", f"{key}: !x {value}", "tag"),
        ):
            text = "\n".join([*lines[:index], replacement, *lines[index + 1 :], ""])
            yield Wrong(f"{label} in line {index + 1}", text.encode(), named)


def broken_bytes() -> Iterator[Wrong]:
    content = dumped(GOOD).encode()
    for position in range(0, len(content), 97):
        for damage in (b"\xff", b"\xe9", b"\xc3("):
            yield Wrong(f"{damage!r} at {position}", content[:position] + damage + content[position:], "UTF-8")


FAMILIES = (
    dropped_keys,
    mistyped_keys,
    wrong_values,
    duplicates,
    contradictions,
    whole_files,
    truncations,
    broken_lines,
    broken_bytes,
)


@functools.cache
def files_of(family) -> tuple[Wrong, ...]:
    return tuple(family())


ONE_PROBLEM = re.compile(r".+: .+, expected .+\. [A-Z].*[.?] \[wrong\.yaml(:\d+)?(: .+)?\]")


def complaint_about(wrong: Wrong, folder) -> str:
    """What the test has against the error of a wrong file; empty where it is as it should be."""
    path = folder / "wrong.yaml"
    path.write_bytes(wrong.content)
    try:
        topology.load(path)
    except ClusterError as error:
        text = str(error).replace(str(path), "wrong.yaml")
    else:
        return f"{wrong.label}: was read as a cluster"
    *lines, last = text.splitlines()
    problems = lines if last.startswith("... and ") else [*lines, last]
    rows = [row for line in text.splitlines() for row in textwrap.wrap(line, 80)]
    fits = len(rows) <= 24 and text.isprintable() is ("\n" not in text)
    placed = re.search(r"\[wrong\.yaml(:\d+|: \w)", text)
    is_good = fits and placed and wrong.named in text and all(map(ONE_PROBLEM.fullmatch, problems))
    return "" if is_good else f"{wrong.label}: {text}"


def test_the_file_that_is_mutated_is_good():
    assert topology.loads(dumped(GOOD)).num_devices == 9
    assert topology.loads(json.dumps(GOOD, indent=1)) == topology.loads(dumped(GOOD))


@pytest.mark.parametrize("path", KEYS, ids=dotted)
def test_a_key_that_is_not_needed_may_be_dropped(path):
    for key in at(GOOD, path).keys() - NEEDED:
        tree = copy.deepcopy(GOOD)
        del at(tree, path)[key]
        assert topology.loads(dumped(tree))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_every_wrong_file_ends_in_one_screen_with_place_and_mend(family, tmp_path):
    complaints = [complaint_about(wrong, tmp_path) for wrong in files_of(family)]
    assert len(complaints) > 10 or family in (contradictions, dropped_keys, duplicates)
    assert [complaint for complaint in complaints if complaint] == []


@pytest.mark.slow
def test_there_are_many_more_than_200_ways():
    wrong_files = [wrong for family in FAMILIES for wrong in files_of(family)]
    contents = {wrong.content for wrong in wrong_files}
    assert dumped(GOOD).encode() not in contents
    assert len(contents) >= 200, f"only {len(contents)} distinct wrong files"
    assert all(len({wrong.content for wrong in files_of(family)}) > 5 for family in FAMILIES)


@pytest.mark.slow
@settings(max_examples=effort.share_of(200))
@given(path=st.sampled_from(list(KEYS)), choose=st.randoms(use_true_random=False), typed=st.characters(codec="ascii"))
def test_any_slip_in_a_key_is_an_unknown_key(tmp_path_factory, path, choose, typed):
    key = choose.choice(sorted(at(GOOD, path)))
    position = choose.randrange(len(key))
    typo = key[:position] + typed + key[position + choose.randint(0, 1) :]
    assume(typo not in KEYS[path])
    wrong = renamed(path, key, typo)
    assert complaint_about(Wrong(wrong.label, wrong.content, "unknown key"), tmp_path_factory.getbasetemp()) == ""


@pytest.mark.parametrize(
    ("path", "key", "typo"),
    [
        ((), "latency", "latancy"),
        (("nodes", 0), "switch", "swich"),
        (("nodes", 1), "nic", "nik"),
        (("switches", 1), "uplink", "uplnk"),
        (("nodes", 0, "devices", 1), "speed", "spede"),
        (("nodes", 0, "nics", 0), "rate", "rates"),
    ],
)
def test_a_mistyped_key_is_told_once_with_the_key_that_was_meant(path, key, typo):
    with pytest.raises(ClusterError, match=f'Did you mean "{key}"') as caught:
        topology.loads(renamed(path, key, typo).content.decode(), source="wrong.yaml")
    assert len(str(caught.value).splitlines()) == 1
