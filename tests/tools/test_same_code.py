import subprocess
import sys
from pathlib import Path

import pytest

from tools import same_code

OLD = '''"""Sums."""

import math
from ringweave import errors, settings
from ringweave.settings import LIMIT

SCALE = 2


def scaled(value, limit=3, *, is_strict=True):
    """Scale a value."""
    if value > limit and is_strict:
        raise errors.RangeError(f"{value} is above {limit}")
    first = math.floor(value)
    second = math.ceil(value)
    return min(first, second) * SCALE + LIMIT


class Sum:
    """A sum."""

    total: int = 0

    @property
    def mean(self):
        return self.total / settings.LIMIT

    def add(self, value):
        self.check(value)
        self.note(value)
        self.total += value

    def check(self, value): ...

    def note(self, value): ...


def both(first, second):
    def one():
        return first

    def two():
        return second

    return one, two
'''
REST = {
    "src/ringweave/errors.py": "class RangeError(Exception): ...\n",
    "src/ringweave/settings.py": "LIMIT = 5\nNUM_LIVES = 3\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def compare(root: Path, old: dict[str, str], new: dict[str, str], modules: str = "", names: str = "") -> list[str]:
    """Differences of two trees; a row of a map is a line of words."""
    maps = {}
    for name, rows in (("modules", modules), ("names", names)):
        lines = ["\t".join(row.split()) for row in rows.strip().splitlines()]
        maps[f"{name}.tsv"] = "\n".join(["header", *lines]) + "\n"
    write(root, maps)
    renames = same_code.Renames.read(root / "modules.tsv", root / "names.tsv")
    trees = [same_code.Tree.read(write(root / name, files)) for name, files in (("old", old), ("new", new))]
    return same_code.compare(*trees, renames).differences  # pyrefly: ignore[bad-argument-count]


def changed(root: Path, before: str, after: str, names: str = "") -> list[str]:
    """Differences after a replacement in `OLD`."""
    assert before in OLD
    old = {**REST, "src/ringweave/sums.py": OLD}
    return compare(root, old, {**old, "src/ringweave/sums.py": OLD.replace(before, after)}, names=names)


def differ(root: Path, before: str, after: str, names: str = "") -> list[str]:
    """Differences of two versions of one module."""
    path = "src/ringweave/sums.py"
    return compare(root, {**REST, path: before}, {**REST, path: after}, names=names)


def test_a_tree_equals_itself(tmp_path):
    assert changed(tmp_path, "SCALE", "SCALE") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("value > limit", "value >= limit"),
        ("value > limit and is_strict", "value > limit or is_strict"),
        ("value > limit and is_strict", "value > limit and not is_strict"),
        ("value > limit and is_strict", "is_strict and value > limit"),
        ("SCALE = 2", "SCALE = 3"),
        ("SCALE = 2", "SCALE = 2.0"),
        ("total: int = 0", "total: int = False"),
        ("is above", "is over"),
        ("limit=3", "limit=4"),
        ("is_strict=True", "is_strict=False"),
        ("limit=3, *, is_strict", "limit=3, is_strict"),
        ("    @property\n", ""),
        ("    @property\n", "    @staticmethod\n"),
        (
            "        self.check(value)\n        self.note(value)\n",
            "        self.note(value)\n        self.check(value)\n",
        ),
        ("        self.check(value)\n", ""),
        ("min(first, second)", "min(second, first)"),
        ("min(first, second)", "max(first, second)"),
        ("min(first, second)", "min(first, first)"),
        ("both(first, second)", "both(second, first)"),
        ("return one, two", "return two, one"),
        ("self.total / settings.LIMIT", "self.total / settings.NUM_LIVES"),
        ("* SCALE + LIMIT", "* LIMIT + SCALE"),
        ("errors.RangeError", "ValueError"),
        ("math.floor", "math.trunc"),
        ("def both", "async def both"),
        ("class Sum:", "class Sum(dict):"),
        ("total: int", "total: float"),
        ("self.total += value", "self.total -= value"),
    ],
)
def test_a_change_is_found(tmp_path, before, after):
    assert changed(tmp_path, before, after)


def test_a_difference_names_the_definition_and_both_lines(tmp_path):
    assert changed(tmp_path, "value > limit", "value >= limit") == [
        "ringweave.sums -> ringweave.sums:scaled: line 12: value > limit\n     -> line 12: value >= limit"
    ]


def test_a_lost_function_is_found(tmp_path):
    assert differ(tmp_path, "def one(): ...\ndef two(): ...\n", "def one(): ...\n") == [
        "ringweave.sums:two: not in the new tree, or not as often"
    ]


def test_a_new_function_is_found(tmp_path):
    assert differ(tmp_path, "def one(): ...\n", "def one(): ...\ndef two(): ...\n") == [
        "ringweave.sums:two: not in the old tree"
    ]


def test_a_lost_method_is_found(tmp_path):
    assert changed(tmp_path, "    def note(self, value): ...\n", "")


def test_lost_changed_and_new_statements_of_a_module_are_found(tmp_path):
    old, other = "work()\nif SCALE:\n    work()\n", "work()\nif not SCALE:\n    work()\n"
    assert differ(tmp_path, old, "work()\n") == ["ringweave.sums: lost or changed: if SCALE:\n    work()"]
    assert len(differ(tmp_path, old, other)) == 2
    assert differ(tmp_path, old, f"{old}work()\n") == ["ringweave.sums: new: work()"]


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        ("mean", "average", "Sum.mean"),
        ("total", "amount", "Sum.total"),
        ("value", "number", "scaled(value)"),
        ("Sum", "Total", "Sum"),
        ("scaled", "multiplied", "scaled"),
        ("SCALE", "FACTOR", "SCALE"),
    ],
)
def test_a_renamed_definition_member_or_parameter_needs_a_row(tmp_path, before, after, row):
    assert changed(tmp_path, before, after)
    assert changed(tmp_path, before, after, f"ringweave.sums {row} {after}") == []


def test_a_keyword_is_renamed_with_its_parameter(tmp_path):
    old = "def f(limit): ...\ndef g(): return f(limit=1)\n"
    new, row = old.replace("limit", "bound"), "ringweave.sums f(limit) bound"
    assert differ(tmp_path, old, new)
    assert differ(tmp_path, old, new, row) == []
    assert differ(tmp_path, old, new.replace("bound=1", "other=1"), row)


def test_docstrings_and_imports_do_not_count(tmp_path):
    new = OLD.replace('"""A sum."""', '"""Total of values."""').replace('"""Scale a value."""\n', "\n")
    new = new.replace("from ringweave import errors, settings\n", "import ringweave.errors as errors\nimport os\n")
    new = new.replace("settings.LIMIT", "LIMIT").replace("import math\n", "import math\nimport json\n")
    old = {**REST, "src/ringweave/sums.py": OLD}
    assert compare(tmp_path, old, {**old, "src/ringweave/sums.py": new}) == []


def test_moved_and_merged_modules_are_accepted(tmp_path):
    old = {
        "src/ringweave/rules/records.py": "class Decree:\n    number = 1\n",
        "src/ringweave/rules/quorum.py": "from ringweave.rules import records\n\ndef f(): return records.Decree()\n",
        "src/ringweave/serving.py": (
            "from ringweave.rules import quorum\nfrom ringweave.rules.records import Decree\n"
            "def serve(x: Decree): return quorum.f() or Decree.number\n"
        ),
        "tests/test_quorum.py": "from ringweave.rules.quorum import f\ndef test(): assert f()\n",
    }
    new = {
        "src/ringweave/membership.py": "class Membership:\n    number = 1\n\ndef f(): return Membership()\n",
        "src/ringweave/service.py": (
            "from ringweave import membership\nfrom ringweave.membership import f\n"
            "def serve(x: membership.Membership): return f() or membership.Membership.number\n"
        ),
        "tests/test_quorum.py": "from ringweave import membership\ndef test(): assert membership.f()\n",
    }
    modules = """
        ringweave.rules.records ringweave.membership
        ringweave.rules.quorum ringweave.membership
        ringweave.serving ringweave.service
    """
    names = "ringweave.rules.records Decree Membership"
    assert compare(tmp_path, old, new, modules, names) == []
    assert compare(tmp_path, old, new, modules)
    assert compare(tmp_path, old, new, names=names)


def test_a_reference_to_another_module_of_the_same_name_is_found(tmp_path):
    rest = {"src/ringweave/a.py": "def f(): ...\n", "src/ringweave/b.py": "def f(): ...\n"}
    old = {**rest, "src/ringweave/c.py": "from ringweave import a\ndef g(): return a.f()\n"}
    new = {**rest, "src/ringweave/c.py": "from ringweave.b import f\ndef g(): return f()\n"}
    (difference,) = compare(tmp_path, old, new)
    assert difference.startswith("ringweave.c -> ringweave.c:g: line 2: a.f")


def test_a_name_that_a_package_exports_is_the_definition(tmp_path):
    rest = {"src/ringweave/rpc/__init__.py": "from ringweave.rpc.client import Client\n"}
    rest["src/ringweave/rpc/client.py"] = "class Client: ...\n"
    old = {**rest, "src/ringweave/a.py": "from ringweave import rpc\ndef f(): return rpc.Client()\n"}
    new = {**rest, "src/ringweave/a.py": "from ringweave.rpc.client import Client\ndef f(): return Client()\n"}
    assert compare(tmp_path, old, new) == []


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("python -m ringweave.server.main", True),
        ("python -m ringweave.serving", False),
        ("python3 -m ringweave.server.main", False),
    ],
)
def test_module_paths_in_strings_go_through_the_map(tmp_path, text, is_accepted):
    old = {"src/ringweave/serving.py": "", "src/ringweave/a.py": 'COMMAND = "python -m ringweave.serving"\n'}
    new = {"src/ringweave/server/main.py": "", "src/ringweave/a.py": f'COMMAND = "{text}"\n'}
    assert (compare(tmp_path, old, new, "ringweave.serving ringweave.server.main") == []) == is_accepted


@pytest.mark.parametrize(
    ("body", "other", "is_accepted"),
    [
        ("x = 1; y = 2; return f(x, y)", "a = 1; b = 2; return f(a, b)", True),
        ("x = 1; y = 2; return f(x, y)", "y = 1; x = 2; return f(y, x)", True),
        ("x = 1; y = 2; return f(x, y)", "a = 1; b = 2; return f(b, a)", False),
        ("x = 1; y = 2; return f(x, y)", "a = 1; a = 2; return f(a, a)", False),
        ("x = 1; x = 2; return f(x, x)", "a = 1; b = 2; return f(b, b)", False),
        ("x = 1; return [x for y in z]", "x = 1; return [x for x in z]", False),
        ("return [x for x in z]", "return [y for y in z]", True),
        ("z = 1; return [z for z in z]", "z = 1; return [y for y in z]", True),
        ("return {x: y for x, y in z}", "return {y: x for x, y in z}", False),
        ("x = 1; return len(x)", "len = 1; return len(len)", False),
        ("x = 1; return lambda: x", "a = 1; return lambda: a", True),
        ('x = 1; return d["x"]', 'y = 1; return d["y"]', False),
    ],
)
def test_local_variables_are_renamed_one_to_one(tmp_path, body, other, is_accepted):
    path = "src/ringweave/a.py"
    head = "f = z = d = None\ndef g():\n    "
    differences = compare(tmp_path, {path: head + body}, {path: head + other})
    assert (differences == []) == is_accepted, differences


@pytest.mark.parametrize(
    ("before", "after"), [("a, b", "a,b"), ("0", "00"), ("1.0", "1.00"), ("x", "(x)"), ("a", "b"), ("'a'", "'b'")]
)
def test_a_string_is_no_annotation_only_because_it_parses(tmp_path, before, after):
    assert differ(tmp_path, f'KEY = "{before}"\n', f'KEY = "{after}"\n')


def test_an_annotation_in_quotes_is_compared_as_code(tmp_path):
    old = {"src/ringweave/a.py": "class Decree: ...\n", "src/ringweave/b.py": ""}
    old["src/ringweave/b.py"] = 'from ringweave import a\ndef f(x: "list[a.Decree]"): ...\n'
    new = {**old, "src/ringweave/a.py": "class Membership: ...\n"}
    new["src/ringweave/b.py"] = 'from ringweave.a import Membership\ndef f(x: "list[Membership]"): ...\n'
    names = "ringweave.a Decree Membership"
    assert compare(tmp_path, old, new, names=names) == []
    new["src/ringweave/b.py"] = 'from ringweave.a import Membership\ndef f(x: "set[Membership]"): ...\n'
    assert compare(tmp_path, old, new, names=names)


CLASS_BODY = "def allocate(): ...\ndef other(): ...\n\nclass Handler:\n    allocate: object = {}\n    {}\n"


def test_a_default_of_the_name_of_its_field_is_the_global(tmp_path):
    old, row = CLASS_BODY.format("allocate", "pass"), "ringweave.sums allocate allocate_buffers"
    new = old.replace("def allocate", "def allocate_buffers").replace("= allocate", "= allocate_buffers")
    assert differ(tmp_path, old, new, row) == []
    assert differ(tmp_path, old, new.replace("= allocate_buffers", "= other"), row)
    assert differ(tmp_path, old, new.replace("= allocate_buffers", "= allocate"), row)


def test_a_name_that_a_class_body_has_bound_is_the_classs(tmp_path):
    old, row = CLASS_BODY.format("allocate", "twin = allocate"), "ringweave.sums allocate allocate_buffers"
    new = old.replace("def allocate", "def allocate_buffers").replace("object = allocate", "object = allocate_buffers")
    assert differ(tmp_path, old, new, row) == []
    assert differ(tmp_path, old, new.replace("twin = allocate", "twin = allocate_buffers"), row)


def test_a_field_without_a_value_leaves_its_name_to_the_global(tmp_path):
    rest = {"src/ringweave/plan.py": "class Plan: ...\nclass Other: ...\n"}
    body = "class Run:\n    plan: plan.Plan\n    other: plan.Other\n"
    old = {**rest, "src/ringweave/a.py": f"from ringweave import plan\n{body}"}
    new = {"src/ringweave/plans.py": rest["src/ringweave/plan.py"]}
    new["src/ringweave/a.py"] = "from ringweave import plans\n" + body.replace("plan.", "plans.")
    assert compare(tmp_path, old, new, "ringweave.plan ringweave.plans") == []


@pytest.mark.parametrize("is_changed", [False, True])
def test_the_command_prints_counts_and_says_by_its_exit_status_if_all_is_equal(tmp_path, is_changed):
    files = {**REST, "src/ringweave/sums.py": OLD}
    write(tmp_path / "old", files)
    new = OLD.replace("limit=3", "limit=4") if is_changed else OLD
    write(tmp_path / "new", {**files, "src/ringweave/sums.py": new})
    command = [sys.executable, same_code.__file__, str(tmp_path / "old"), str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == is_changed
    verdict = "different: 1" if is_changed else "equal"
    assert done.stdout.endswith(f"{verdict}; compared: 2 classes, 3 constants, 8 functions\n")


def test_a_map_that_is_not_there_is_an_error(tmp_path):
    maps = ["--modules", str(tmp_path / "modules.tsv")]
    command = [sys.executable, same_code.__file__, str(tmp_path), str(tmp_path), *maps]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "modules.tsv: no such file. Leave the option out" in done.stderr
