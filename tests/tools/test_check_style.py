import subprocess
import sys
from pathlib import Path

import pytest

from tools import check_style
from tools.check_style import Exceptions

NONE = Exceptions()
SOURCE = "src/ringweave"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def found(root: Path, files: dict[str, str], exceptions: Exceptions = NONE) -> list[str]:
    return list(check_style.check(write(root, files), exceptions)[0])


def function(num_statements: int, head: str = "def work():", indent: str = "") -> str:
    return f"{indent}{head}\n" + f"{indent}    print()\n" * num_statements


def test_a_good_tree_has_no_findings(tmp_path):
    files = {
        f"{SOURCE}/loader.py": '"""Loader: reads samples."""\n\n\nclass Loader:\n    """Reads samples."""\n',
        f"{SOURCE}/plan.py": function(40),
        "bench/ringweave_bench/kills.py": "class Kills:\n    pass\n",
        "README.md": "# What it is\n\nA group trains. Does it stop? It goes on.\n",
    }
    assert found(tmp_path, files) == []


def test_a_class_name_is_unique_in_both_packages(tmp_path):
    files = {f"{SOURCE}/a.py": "class Desk: ...\n", "bench/ringweave_bench/b.py": "\n\nclass Desk: ...\n"}
    assert found(tmp_path, files) == [
        "bench/ringweave_bench/b.py:3: class name Desk is taken by src/ringweave/a.py:1. "
        "Say in the name which one this is"
    ]
    assert found(tmp_path, {}, Exceptions(class_names={"Desk": "two ends"})) == []


def test_a_module_name_is_unique(tmp_path):
    files = {f"{SOURCE}/a/split.py": "", f"{SOURCE}/b/split.py": ""}
    (finding,) = found(tmp_path, files)
    assert finding.startswith("src/ringweave/b/split.py:1: module name split is taken by src/ringweave/a/split.py:1.")
    assert found(tmp_path, {}, Exceptions(module_names={"split": "verb"})) == []


def test_a_module_is_not_named_by_a_gerund(tmp_path):
    files = {f"{SOURCE}/preparing.py": "", f"{SOURCE}/ring_grouping.py": "", f"{SOURCE}/string.py": ""}
    findings = found(tmp_path, files, Exceptions(gerunds={"string": "no gerund"}))
    assert [each.split(". ")[0] for each in findings] == [
        "src/ringweave/preparing.py:1: module named by a gerund: preparing",
        "src/ringweave/ring_grouping.py:1: module named by a gerund: grouping",
    ]


@pytest.mark.parametrize("word", ["What", "Who", "Where", "How", "Of", "Whose", "Whether", "Whoever", "Whatever"])
@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""{} it does."""\n', 1),
        ('\nclass Loader:\n    """{} it does."""\n', 2),
        ('\n\nasync def load():\n    """{}, it does."""\n', 3),
    ],
    ids=["module", "class", "function"],
)
def test_a_docstring_does_not_begin_with_a_relative_word(tmp_path, word, source, line):
    (finding,) = found(tmp_path, {f"{SOURCE}/loader.py": source.format(word)})
    assert finding.startswith(f"src/ringweave/loader.py:{line}: docstring begins with {word}.")


def test_a_docstring_may_have_a_relative_word_inside(tmp_path):
    assert found(tmp_path, {f"{SOURCE}/loader.py": '"""Loader, whose samples are read. However it stops."""\n'}) == []


def test_a_function_has_at_most_sixty_lines_of_code(tmp_path):
    (finding,) = found(tmp_path, {f"{SOURCE}/plan.py": function(60)})
    assert finding == "src/ringweave/plan.py:1: work has 61 lines, at most 60. Split it into steps"
    comments = '    """Work.\n\n    Slowly.\n    """\n    # A comment.\n\n'
    fits = function(59).replace("\n", f"\n{comments}", 1)
    assert found(tmp_path, {f"{SOURCE}/plan.py": fits}) == []


def test_functions_above_the_aim_are_counted(tmp_path):
    write(tmp_path, {f"{SOURCE}/plan.py": function(40) + function(39) + function(45)})
    findings, counts = check_style.check(tmp_path, NONE)
    assert not findings
    assert counts == "house style: 0 findings in 1 files; 2 of 3 functions have more than 40 lines"


@pytest.mark.parametrize(
    ("constructor", "got"),
    [
        (function(25, "def __init__(self):", "    "), "26 lines and 0 parameters"),
        (function(1, "def __init__(self, a, b, c, d, *, e, f, g, h):", "    "), "2 lines and 8 parameters"),
        (function(1, "def __init__(self, a, b, c, d, e, f, *g, **h):", "    "), "2 lines and 8 parameters"),
    ],
)
def test_a_constructor_is_short(tmp_path, constructor, got):
    files = {f"{SOURCE}/loader.py": f"class Loader:\n{constructor}"}
    (finding,) = found(tmp_path, files)
    assert finding.startswith(f"src/ringweave/loader.py:2: constructor of Loader has {got}, at most 25 and 7.")
    assert found(tmp_path, files, Exceptions(constructors={"Loader": "keeps its arguments"})) == []


def test_a_constructor_at_the_limit_passes(tmp_path):
    constructor = function(24, "def __init__(self, a, b, c, d, e, f, g):", "    ")
    assert found(tmp_path, {f"{SOURCE}/loader.py": f"class Loader:\n{constructor}"}) == []


def test_a_file_has_at_most_seven_hundred_lines(tmp_path):
    assert found(tmp_path, {f"{SOURCE}/plan.py": "X = 1\n" * 700}) == []
    (finding,) = found(tmp_path, {f"{SOURCE}/plan.py": "X = 1\n" * 701})
    assert finding.startswith("src/ringweave/plan.py:1: file of 701 lines, at most 700.")


def test_few_modules_have_their_one_importer_beside_them(tmp_path):
    most = check_style.MAX_SECTIONS
    files = {f"{SOURCE}/rpc/part{number}.py": "" for number in range(most + 1)}
    imports = [f"from ringweave.rpc import part{number}\n" for number in range(most + 1)]
    assert found(tmp_path, {**files, f"{SOURCE}/rpc/server.py": "".join(imports[:most])}) == []
    (finding,) = found(tmp_path, {f"{SOURCE}/rpc/server.py": "".join(imports)})
    assert finding.startswith(
        f"src/ringweave:1: {most + 1} modules have one importer, in their own folder, at most {most}."
    )
    # A second importer, or one in another folder, makes a module no section.
    assert found(tmp_path, {f"{SOURCE}/rpc/client.py": imports[0]}) == []
    (tmp_path / SOURCE / "rpc/client.py").unlink()
    files = {f"{SOURCE}/rpc/server.py": "".join(imports[1:]), f"{SOURCE}/main.py": imports[0]}
    assert found(tmp_path, files) == []


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "docs/how-to/jobs.md"])
def test_documents_use_no_private_word(tmp_path, document):
    assert found(tmp_path, {document: "# Jobs\n\nThe Lobby and\nthe host libraries.\n"}) == [
        f"{document}:3: private word: Lobby. Write: startup rendezvous",
        f"{document}:4: private word: host libraries. Write: native backend",
    ]


def test_private_words_are_allowed_where_no_reader_starts_and_where_the_glossary_defines_them(tmp_path):
    files = {"docs/notebook/log.md": "The lobby.\n", "docs/decisions/0001-lobby.md": "What a lobby is, is here.\n"}
    assert found(tmp_path, files) == []
    glossary = "| word | meaning |\n|---|---|\n| `lobby` (of a run), foyer | a room |\n"
    files = {"docs/explanation/glossary.md": glossary, "docs/jobs.md": "Two lobbies, one lobby, a crew.\n"}
    assert found(tmp_path, files) == ["docs/jobs.md:1: private word: crew. Write: node workers, or trainer state"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Who comes late waits.\n", 1),
        ("It starts. What is lost,\nis lost.\n", 1),
        ("It starts\nand stops. **Where it ends**, nobody knows.\n", 2),
        ("- It starts.\n- Whoever is late\n", 2),
        ("1. Whether it\n   stops is open.\n", 1),
        ("> How it ends: badly.\n", 1),
        ("It ends. (Whose it is.)\n", 1),
    ],
)
def test_no_sentence_begins_with_a_clause_without_a_head(tmp_path, text, line):
    (finding,) = found(tmp_path, {"README.md": text})
    assert finding.startswith(f"README.md:{line}: sentence begins with a headless clause:")


@pytest.mark.parametrize(
    "text",
    [
        "# What it does\n",
        "What does it do? It trains.\n",
        "*How long does\nit take?* Not long.\n",
        "However late, it starts. It waits for what is lost.\n",
        "```text\nWho comes late waits.\n```\n",
        "| What | who |\n|---|---|\n| Where it is | here |\n",
        "- [What it is](what.md)\n",
    ],
)
def test_questions_headings_code_tables_and_titles_are_no_such_sentences(tmp_path, text):
    assert found(tmp_path, {"README.md": text}) == []


def test_an_exception_that_nothing_needs_is_a_finding(tmp_path):
    exceptions = Exceptions(
        class_names={"Desk": "gone"}, module_names={"split": "gone"}, constructors={"Loader": "short by now"}
    )
    assert [each.split(": ", 1)[1] for each in found(tmp_path, {}, exceptions)] == [
        "exception without need: class_names, Desk. Remove the row",
        "exception without need: module_names, split. Remove the row",
        "exception without need: constructors, Loader. Remove the row",
    ]


def test_the_command_prints_findings_and_exits_with_1(tmp_path):
    write(tmp_path, {f"{SOURCE}/preparing.py": ""})
    command = [sys.executable, check_style.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "src/ringweave/preparing.py:1: module named by a gerund: preparing." in done.stdout


def test_the_command_exits_with_0_if_nothing_is_found(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check_style, "check", lambda root: (check_style.Findings(), f"nothing in {root}"))
    assert check_style.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"nothing in {tmp_path}\n"
