"""Check names, docstrings, sizes and words against the house style; `make check` calls it.

    python tools/check_style.py [ROOT]

Each finding is one line: file, line, finding and what to write instead. The exit status is 1 if there is any. The
tables below hold the exceptions, each with its reason; a row that nothing needs any more is a finding too. Lines of a
function are lines of code: docstrings, comments and empty lines do not count.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOTS = ("src/ringweave", "bench/ringweave_bench")
GLOSSARY = "docs/explanation/glossary.md"
UNCHECKED_DOCS = ("docs/notebook", "docs/decisions")
RELATIVES = {"What", "Who", "Where", "How", "Of", "Whose", "Whether", "Whoever", "Whatever"}
MAX_FUNCTION_LINES, AIM_FUNCTION_LINES, MAX_FILE_LINES = 60, 40, 700
MAX_INIT_LINES, MAX_INIT_PARAMETERS = 25, 7
MAX_SECTIONS = 39
"""Modules per root whose one importer is in their own folder."""
USERS_FOLDERS = ("integrations",)
"""Folders whose modules users import: each is a door of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exceptions:
    """Exceptions to the rules: a reason by name."""

    class_names: Mapping[str, str] = field(default_factory=dict)
    module_names: Mapping[str, str] = field(default_factory=dict)
    gerunds: Mapping[str, str] = field(default_factory=dict)
    """By the last word of a module's name; a row that nothing needs may stay."""
    constructors: Mapping[str, str] = field(default_factory=dict)
    """By class."""


def _table(text: str) -> dict[str, str]:
    """Read lines `reason: name, name`."""
    rows = [line.split(":", 1) for line in text.strip().splitlines()]
    return {name.strip(): reason.strip() for reason, names in rows for name in names.split(",")}


HERE = Exceptions(
    module_names=_table("""
        Python's: __init__, __main__
        program of a process, or of the command line: main
        the same part of each service, as in Kafka, etcd and gRPC: client, messages, service
        the same part of each platform: agent_main, job_runtime, platform, registry
        control loop, of a repartition and of a Slurm job: controller
        the module in cli/ has the name of its verb: lab, operator, server
    """),
    gerunds=_table("""
        computing: batching, encoding, logging, profiling, scheduling, testing
        networks, training and schedules: framing, pricing, routing, sharding, staging, timing
        halving-doubling, an MPI algorithm: doubling
        a noun: accounting, drawing, grouping, lightning, ring, string
        users type ringweave.pipeline.adapting: adapting
        imported by its bare name by programs that run by path: serving
    """),
    constructors=_table("""
        keeps its arguments, no more: CollectiveEngine, MembershipClient, RingClient, RpcServer
        builds parts in the order in which they need each other: CollectiveSimulator, Pipeline, RingweaveProcessGroup
        sets a process up, or several: CoordinatorProcess, ParameterServerProcess, Ranks
    """),
)

PRIVATE_WORDS = _table(r"""
    agent gateway: desks?
    at the start barrier: (at|to) the gate
    autotuner: advisers?
    benchmark: rehears(e|es|ed|ing|als?)
    confirmed term: reigns?
    control tree: councils?
    decision, or tuning decision: rulings?
    event log: scribes?
    evicted: put out
    final checkpoint owner: heirs?, heirless, bequeath(s|ed|ing)?
    generation id: ballots?
    membership, or generation: decrees?
    native backend: host librar(y|ies)
    node workers, or trainer state: crews?
    pause: st(and|ands|anding|ood) still, thaw(s|ed|ing)?
    piggyback: riders?
    primary: tellers?
    rebalance controller: overseers?
    recovery source: donors?, givers?
    report a failure: accus(e|es|ed|ing)
    restart round: regather(s|ed|ing)?
    ring assignment: seats?, seatings?
    ring progress: testaments?
    schedule selector: directors?
    session state: footings?
    sidecar process: attendants?
    startup rendezvous: lobb(y|ies)
    state server: shel(f|ves)
    superseded: deposed
    unconfirmed predecessors: forerunners?
    upload: lodg(e|es|ed|ing)
""")
"""Old words of our own that mean nothing else in these documents, as patterns, and what to say instead."""


class Findings(list[str]):
    """Lines to print."""

    def note(self, path: Path, line: int, text: str) -> None:
        self.append(f"{path}:{line}: {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One parsed file of Python."""

    path: Path
    """Relative to the root of the repository."""
    root: str
    lines: list[str]
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name."""
        parts = self.path.relative_to(Path(self.root).parent).with_suffix("").parts
        return ".".join(parts).removesuffix(".__init__")


def read_sources(repository: Path) -> list[SourceFile]:
    """Parse all files of the two packages."""
    return [
        SourceFile(path=file.relative_to(repository), root=root, lines=text.splitlines(), tree=ast.parse(text))
        for root in ROOTS
        for file in sorted((repository / root).rglob("*.py"))
        for text in [file.read_text(encoding="utf-8")]
    ]


def check_names(sources: list[SourceFile], exceptions: Exceptions, findings: Findings) -> None:
    """Find class and module names that are not unique, and modules named by a gerund."""
    classes, modules = defaultdict(list), defaultdict(list)
    for source in sources:
        modules[source.path.stem].append((source.path, 1))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((source.path, node.lineno))
        word = source.path.stem.rpartition("_")[2]
        if word.endswith("ing") and word not in exceptions.gerunds:
            findings.note(source.path, 1, f"module named by a gerund: {word}. Name the thing that it holds")
    for kind, places, excepted in (
        ("class", classes, exceptions.class_names),
        ("module", modules, exceptions.module_names),
    ):
        for name, where in places.items():
            for path, line in where[1:] if name not in excepted else ():
                first = f"{where[0][0]}:{where[0][1]}"
                findings.note(path, line, f"{kind} name {name} is taken by {first}. Say in the name which one this is")
        _note_stale(findings, f"{kind}_names", excepted, {name for name, where in places.items() if len(where) > 1})


def check_docstrings(sources: list[SourceFile], findings: Findings) -> None:
    """Find docstrings that begin with a relative word."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for source in sources:
        for node in ast.walk(source.tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and (word := text.split(None, 1)[0].strip(".,:")) in RELATIVES:
                advice = "Begin with the thing, or with a verb"
                findings.note(source.path, getattr(node, "lineno", 1), f"docstring begins with {word}. {advice}")


def check_sizes(sources: list[SourceFile], exceptions: Exceptions, findings: Findings) -> list[int]:
    """Find files, functions and constructors that are too long.

    Returns:
        Lines of every function.
    """
    sizes, long_constructors = [], set()
    for source in sources:
        if len(source.lines) > MAX_FILE_LINES:
            advice = f"at most {MAX_FILE_LINES}. Split it by concepts"
            findings.note(source.path, 1, f"file of {len(source.lines)} lines, {advice}")
        for owner, function in _functions(source.tree, ""):
            sizes.append(_code_lines(function, source.lines))
            if function.name == "__init__" and _is_long_constructor(sizes[-1], _parameters(function)):
                long_constructors.add(owner)
                if owner not in exceptions.constructors:
                    got = f"{sizes[-1]} lines and {_parameters(function)} parameters"
                    allowed = f"at most {MAX_INIT_LINES} and {MAX_INIT_PARAMETERS}. Build its parts outside"
                    findings.note(source.path, function.lineno, f"constructor of {owner} has {got}, {allowed}")
            elif sizes[-1] > MAX_FUNCTION_LINES:
                advice = f"at most {MAX_FUNCTION_LINES}. Split it into steps"
                findings.note(source.path, function.lineno, f"{function.name} has {sizes[-1]} lines, {advice}")
    _note_stale(findings, "constructors", exceptions.constructors, long_constructors)
    return sizes


def _functions(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, child
        yield from _functions(child, child.name if isinstance(child, ast.ClassDef) else owner)


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    texts = [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
    ]
    left_out = {line for each in texts for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    numbers = set(range(function.lineno, (function.end_lineno or function.lineno) + 1)) - left_out
    return sum(not re.match(r"\s*(#|$)", lines[number - 1]) for number in numbers)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = function.args
    variadic = [each for each in (every.vararg, every.kwarg) if each is not None]
    return len([*every.posonlyargs, *every.args, *every.kwonlyargs, *variadic]) - 1


def _is_long_constructor(lines: int, parameters: int) -> bool:
    return lines > MAX_INIT_LINES or parameters > MAX_INIT_PARAMETERS


def check_sections(sources: list[SourceFile], findings: Findings, limit: int = MAX_SECTIONS) -> None:
    """Find too many modules that have one importer, in their own folder: they are sections of that importer."""
    for root in ROOTS:
        by_module = {each.module: each for each in sources if each.root == root}
        importers: dict[str, set[str]] = defaultdict(set)
        for source in by_module.values():
            for name in _imported(source.tree):
                if name in by_module and name != source.module:
                    importers[name].add(source.module)
        sections = [
            source.path
            for name, source in by_module.items()
            if source.path.stem not in ("__init__", "__main__")
            and len(importers[name]) == 1
            and by_module[next(iter(importers[name]))].path.parent == source.path.parent
            and source.path.parent.name not in USERS_FOLDERS
        ]
        if len(sections) > limit:
            text = (
                f"{len(sections)} modules have one importer, in their own folder, at most {limit}. Merge some into it"
            )
            findings.note(Path(root), 1, f"{text}: {', '.join(map(str, sections))}")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def check_documents(repository: Path, findings: Findings) -> None:
    """Find private words without a definition, and sentences that begin with a relative clause without a head."""
    glossary = repository / GLOSSARY
    defined = _defined_words(glossary.read_text(encoding="utf-8")) if glossary.exists() else set()
    patterns = [(re.compile(rf"\b(?:{each})\b", re.IGNORECASE), word) for each, word in PRIVATE_WORDS.items()]
    for file in _documents(repository):
        path, text = file.relative_to(repository), file.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            for found, instead in ((found, word) for each, word in patterns for found in each.finditer(line)):
                if found.group().lower() not in defined:
                    findings.note(path, number, f"private word: {found.group()}. Write: {instead}")
        for number, sentence in _sentences(text):
            word = re.split(r"[^A-Za-z]", sentence.lstrip("*_\"'(> "))[0]
            is_question = sentence.rstrip("*_\"') ").endswith("?")
            if word in RELATIVES - {"Of"} and not is_question and not sentence.startswith(("[", "How to ")):
                findings.note(path, number, f"sentence begins with a headless clause: {word}. Begin with the thing")


def _documents(repository: Path) -> Iterator[Path]:
    yield from (each for name in ("README.md", "ARCHITECTURE.md") if (each := repository / name).exists())
    for file in sorted((repository / "docs").rglob("*.md")):
        if not file.relative_to(repository).as_posix().startswith(UNCHECKED_DOCS):
            yield file


def _defined_words(glossary: str) -> set[str]:
    """Words in the first cells of the tables, and their plurals."""
    cells = [re.sub(r"\(.*?\)", "", line.split("|")[1]) for line in glossary.splitlines() if line.startswith("|")]
    words = [word.strip(" `").lower() for cell in cells for word in cell.split(",")]
    return {form for word in words for form in (word, f"{word}s", re.sub("y$", "ies", word))}


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    """Sentences outside of code and headings, each with its line; cells of a table are phrases."""
    is_code = False
    blocks: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if is_code or is_fence or not line.strip() or line.startswith(("#", "|")):
            yield from (each for block in blocks for each in _split(*block))
            blocks = []
        elif not blocks or re.match(r"\s*([-*>]|\d+\.)\s", line):
            blocks.append((number, line))
        else:
            blocks[-1] = (blocks[-1][0], f"{blocks[-1][1]}\n{line}")


def _split(number: int, block: str) -> Iterator[tuple[int, str]]:
    ends = [each.end() for each in re.finditer(r"[.!?:][)\"*_]*\s+", block)]
    for start, end in zip([0, *ends], [*ends, len(block)], strict=True):
        yield number + block.count("\n", 0, start), re.sub(r"^([-*>]|\d+\.)\s+", "", block[start:end].strip())


def _note_stale(findings: Findings, table: str, rows: Iterable[str], needed: set[str]) -> None:
    for name in sorted(set(rows) - needed):
        findings.note(Path("tools/check_style.py"), 1, f"exception without need: {table}, {name}. Remove the row")


def check(repository: Path, exceptions: Exceptions = HERE) -> tuple[Findings, str]:
    """Apply every rule.

    Returns:
        The findings, and a line of counts.
    """
    findings, sources = Findings(), read_sources(repository)
    check_names(sources, exceptions, findings)
    check_docstrings(sources, findings)
    sizes = check_sizes(sources, exceptions, findings)
    check_sections(sources, findings)
    check_documents(repository, findings)
    num_long = sum(size > AIM_FUNCTION_LINES for size in sizes)
    long = f"{num_long} of {len(sizes)} functions have more than {AIM_FUNCTION_LINES} lines"
    return findings, f"house style: {len(findings)} findings in {len(sources)} files; {long}"


def main(arguments: list[str]) -> int:
    """Print the findings in the repository that the command line names, or in this one."""
    findings, counts = check(Path(arguments[0]) if arguments else Path(__file__).parents[1])
    print(*findings, counts, sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
