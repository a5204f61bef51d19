"""PyTorch's own distributed tests on ringweave, compared with Gloo test by test.

    python bench/torch_tests.py --match 'barrier|all_reduce' --out results.json     # pip install expecttest
    TORCH_DISTRIBUTED_DEBUG=DETAIL python bench/torch_tests.py --match barrier --systems ringweave

The tests are those that torch installs (`torch.testing._internal.distributed.distributed_test`). They ask for Gloo;
RINGWEAVE_REPLACE_BACKEND=1 gives them ringweave instead. Each test has processes of its own, forked from one that has
torch loaded, and a time limit. Gloo runs first, and then ringweave runs what passed on Gloo: with its own choices
(`ringweave`), and by a schedule whatever the size of the message (`ring`, or the name of another schedule). A test that
fails is run once more, since some depend on time. The outcomes go to `--out` as JSON, where a later call finds them,
adds to them and repeats those that failed. Exit code 1 if a test passes on Gloo alone, other than those in NAME_TESTS.
"""

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

GLOO, OWN_CHOICE = "gloo", "ringweave"
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
NAME_TESTS = {"test_get_backend": "compares the backend's name with gloo"}
"""Tests that ringweave is not to pass, and the reason."""
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Failure)\b.*$", re.MULTILINE)
_MAX_REASON = 300
_MIN_GROUP_OF_TWO = 3
"""World size from which there are the groups of ranks 1 and 2 that some tests make; torch skips these below 8."""
_CRASHES = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGSEGV)
"""Exit codes of processes that nothing ended from outside; torch looks at the first process alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one test on one system; seconds are measured."""

    outcome: str
    seconds: float
    reason: str = ""
    """Last error of a test that failed."""
    tries: int = 1


Outcomes = dict[str, dict[str, Outcome]]
"""By test and system."""


def main() -> None:
    """Run the tests and print those that pass on Gloo alone."""
    options = parse_options()
    if options.run:
        run_tests(options)
        return
    outcomes = load_outcomes(options.out)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(options.logs or folder)
        logs.mkdir(parents=True, exist_ok=True)
        wanted = [name for name in list_tests() if re.search(options.match, name)]
        for systems in ([GLOO], options.systems):
            run_systems(systems, wanted, outcomes, options, logs)
    sys.exit(1 if report(outcomes, wanted, options.systems) else 0)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="regular expression that a test's name must contain (all)")
    parser.add_argument("--systems", nargs="+", default=[OWN_CHOICE, "ring"], help="ringweave, or schedules' names")
    parser.add_argument("--world-size", type=int, default=3, help="processes of a test (3)")
    parser.add_argument("--limit", type=int, default=90, help="seconds that a test may take (90)")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time (2)")
    parser.add_argument(
        "--out", type=Path, help="JSON file of outcomes; what it has is not run again, but for failures"
    )
    parser.add_argument("--logs", type=Path, help="folder for the output of every test")
    parser.add_argument("--run", metavar="SYSTEM", help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def load_outcomes(path: Path | None) -> Outcomes:
    """Return the outcomes of earlier calls."""
    if path is None or not path.exists():
        return {}
    tests = json.loads(path.read_text())["tests"]
    return {name: {system: Outcome(**row) for system, row in rows.items()} for name, rows in tests.items()}


def list_tests() -> list[str]:
    """Return the names of the tests, sorted."""
    command = [sys.executable, __file__, "--run", "list"]
    found = subprocess.run(command, env=environment(GLOO, 1), check=True, stdout=subprocess.PIPE, text=True)
    return sorted(json.loads(found.stdout.splitlines()[-1]))


def environment(system: str, world_size: int) -> dict[str, str]:
    """Return the environment of the process that forks the tests of one system."""
    # The test module reads these at its import.
    tests = {"BACKEND": GLOO, "WORLD_SIZE": str(world_size), "INIT_METHOD": "file:///tmp/unused"}
    replaced = {"RINGWEAVE_REPLACE_BACKEND": "" if system == GLOO else "1"}
    forced = {"RINGWEAVE_SCHEDULE": "" if system in (GLOO, OWN_CHOICE) else system}
    return {**os.environ, **tests, **replaced, **forced, "OMP_NUM_THREADS": "1"}


def run_systems(
    systems: Sequence[str], wanted: Sequence[str], outcomes: Outcomes, options: argparse.Namespace, logs: Path
) -> None:
    """Run what is not in `outcomes` yet, and has passed on Gloo; add it there and to the file."""
    rows: queue.SimpleQueue[tuple[str, str, Outcome] | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(options.jobs) as pool:
        running = []
        for system in systems:
            tests = [name for name in wanted if is_due(outcomes.get(name, {}), system)]
            num_parts = max(1, options.jobs // len(systems))
            for part in range(num_parts):
                running.append(pool.submit(run_system, system, tests[part::num_parts], options, logs, rows.put))
        num_open = len(running)
        while num_open:
            row = rows.get()
            if row is None:
                num_open -= 1
                continue
            name, system, outcome = row
            outcomes.setdefault(name, {})[system] = outcome
            print(f"{system:12} {outcome.outcome:8} {outcome.seconds:6.1f} s  {name}  {outcome.reason}", flush=True)
            save_outcomes(outcomes, options)
        for each in running:
            each.result()


def is_due(rows: dict[str, Outcome], system: str) -> bool:
    """Return True if a test is to be run on a system: what failed in an earlier call is run again."""
    is_open = system not in rows or rows[system].outcome == FAILED
    return is_open and (system == GLOO or (GLOO in rows and rows[GLOO].outcome == PASSED))


def run_system(
    system: str,
    tests: Sequence[str],
    options: argparse.Namespace,
    logs: Path,
    report_row: Callable[[tuple[str, str, Outcome] | None], None],
) -> None:
    """Run tests on one system, one after the other, in a process that forks them; None is the last that is reported."""
    numbers = ["--limit", str(options.limit), "--world-size", str(options.world_size), "--logs", str(logs)]
    command = [sys.executable, __file__, "--run", system, *numbers, "--", *tests]
    try:
        if not tests:
            return
        with subprocess.Popen(
            command, env=environment(system, options.world_size), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                name, row = json.loads(line)
                report_row((name, system, Outcome(**row)))
        if process.returncode:
            raise RuntimeError(f"the process of {system} ended with {process.returncode}; call this again to go on")
    finally:
        report_row(None)


def save_outcomes(outcomes: Outcomes, options: argparse.Namespace) -> None:
    """Replace the file of outcomes."""
    if options.out is None:
        return
    tests = {name: {key: asdict(row) for key, row in rows.items()} for name, rows in sorted(outcomes.items())}
    document = {
        **{name: importlib.metadata.version(name) for name in ("ringweave", "torch")},
        "world_size": options.world_size,
        "debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", ""),
        "tests": tests,
    }
    temporary = options.out.with_suffix(".new")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(options.out)


def report(outcomes: Outcomes, wanted: Sequence[str], systems: Sequence[str]) -> list[str]:
    """Print counts and the tests that pass on Gloo alone; return the unexpected ones."""
    unexpected = []
    rows = {name: outcomes[name] for name in wanted if name in outcomes}
    for system in (GLOO, *systems):
        kinds = [by_system[system].outcome for by_system in rows.values() if system in by_system]
        print(f"{system}: {', '.join(f'{kinds.count(kind)} {kind}' for kind in (PASSED, FAILED, SKIPPED))}")
    print("\n| test | system | expected | error |\n|---|---|---|---|")
    for name, by_system in rows.items():
        for system in systems:
            if system in by_system and by_system[system].outcome != PASSED:
                known = NAME_TESTS.get(name, "")
                unexpected += [] if known else [f"{name} on {system}"]
                print(f"| {name} | {system} | {known or 'no'} | {by_system[system].reason} |")
    return unexpected


def run_tests(options: argparse.Namespace) -> None:
    """Print one JSON line for each test: in the process that forks them."""
    case = make_test_case(options.limit, options.world_size, forces=options.run not in (GLOO, OWN_CHOICE, "list"))
    if options.run == "list":
        print(json.dumps(unittest.TestLoader().getTestCaseNames(case)))
        return
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for name in options.tests:
        tried = [run_test(case, name, options.logs / f"{options.run}-{name}.log", 1)]
        if tried[0].outcome == FAILED:
            tried.append(run_test(case, name, options.logs / f"{options.run}-{name}-2.log", 2))
        print(json.dumps([name, asdict(tried[-1])]), file=lines, flush=True)


def run_test(case: type[unittest.TestCase], name: str, log: Path, tries: int) -> Outcome:
    """Run one test; what it and its processes print goes to `log`."""
    result, started_s = unittest.TestResult(), time.monotonic()
    with redirected_output(log):
        case(name).run(result)
    seconds = round(time.monotonic() - started_s, 2)
    bad = [text for _, text in (*result.errors, *result.failures)]
    if bad:
        errors = _ERROR_LINE.findall(bad[0]) or [bad[0].strip().rpartition("\n")[2]]
        reason = errors[-1].replace("|", "/")[:_MAX_REASON]
        return Outcome(outcome=FAILED, seconds=seconds, reason=reason, tries=tries)
    reason = result.skipped[0][1] if result.skipped else ""
    return Outcome(outcome=SKIPPED if result.skipped else PASSED, seconds=seconds, reason=reason, tries=tries)


@contextlib.contextmanager
def redirected_output(log: Path) -> Iterator[None]:
    """Send output, of child processes too, to a file."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            for descriptor, old in zip((1, 2), kept, strict=True):
                os.dup2(old, descriptor)
                os.close(old)


def make_test_case(limit_s: int, world_size: int, *, forces: bool) -> Any:
    """Return torch's test class, whose processes are forked; `forces` lets a forced schedule run every size."""
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_DEFAULT = limit_s
    common_distributed.TIMEOUT_OVERRIDE.clear()
    if world_size >= _MIN_GROUP_OF_TWO:
        common_distributed.skip_if_small_worldsize = lambda function: function
    skip_without_gpus(common_distributed)
    from torch.testing._internal.distributed import distributed_test

    if forces:
        from ringweave.comm import plan_choice

        plan_choice.MIN_SCHEDULED_BYTES = 0

    sync = distributed_test.Barrier.sync  # over files, with 10 s for a busy machine to start processes
    distributed_test.Barrier.sync = lambda wait_for=None, timeout=0: sync(wait_for, max(timeout, limit_s))

    class TorchTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # torch's set-up makes one for each test
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            processes = list(self.processes)
            crashed = [each.exitcode for each in processes if each.exitcode in _CRASHES]
            super().tearDown()  # which terminates them
            for process in processes:
                process.join(1)
                process.kill()
                process.join()
            if crashed:
                raise AssertionError(f"processes ended by signals: {crashed}")

    return TorchTests


def skip_without_gpus(common_distributed: ModuleType) -> None:
    """Let tests that need GPUs be skipped before their processes start."""
    import torch

    if torch.cuda.is_available():
        return
    skip, original = unittest.skip("needs GPUs"), common_distributed.skip_if_lt_x_gpu
    common_distributed.skip_if_no_gpu = skip
    common_distributed.skip_if_lt_x_gpu = lambda count, *, allow_cpu=False: (
        original(count, allow_cpu=True) if allow_cpu else skip
    )


if __name__ == "__main__":
    main()
