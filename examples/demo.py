"""`make demo`: one training, by DDP on Gloo and by ringweave, in a lab: two racks, a thin uplink, a slow worker.

In the run of ringweave a worker is killed. All ends with one page, page.html in --out: the comparison (also page.png)
and the report of that run. Root is not needed where Linux gives users namespaces; where there can be no lab, the
first example trains on this machine as it is.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringweave import lab, topology
from ringweave.lab import Lab, tools, user_namespace
from ringweave.lab.cpu_quotas import QUOTA_PERIOD_US
from ringweave.telemetry.events import read_events
from support import demo_data, demo_page

EXAMPLES = Path(__file__).resolve().parent
CLUSTER, SCRIPT = EXAMPLES / "clusters" / "thin-uplink.yaml", EXAMPLES / "04_text_unequal.py"
RINGWEAVE = [sys.executable, "-m", "ringweave"]
KILLED_RANK = 2
MASTER_PORT = "29411"
RUN_TIMEOUT_S = 600
QUOTA_FRACTION = 0.8
"""Part of the lab's quotas that the workers get, so that other work on the machine has room beside them."""
COUNTED_STEPS = 10
"""Train steps between two looks at the uplink's counters."""
GRADIENTS_TEXT = "3.4MB"
TAKE_DOWN = 'cat > /dev/null; exec "$1" -m ringweave lab down --lab "$2" > /dev/null 2>&1'
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def parse_options() -> argparse.Namespace:
    """Returns the command line; the defaults take 130 to 260 s on two cores, by what else runs there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for everything the demo leaves")
    parser.add_argument("--steps", type=int, default=60, help="train steps of each system")
    parser.add_argument("--batch", type=int, default=56, help="sequences in a step")
    parser.add_argument("--warm-up", type=int, default=15, help="steps before the measured ones")
    parser.add_argument("--kill-after", type=int, default=36, help="steps of ringweave before the kill")
    parser.add_argument("--script-options", default="", help="further options of the script")
    options = parser.parse_args()
    if not 0 < options.warm_up < options.kill_after < options.steps:
        given = f"--warm-up {options.warm_up}, --kill-after {options.kill_after}, --steps {options.steps}"
        parser.error(f"{given}: the kill has to come after the warm-up and before the end. Give them in this order.")
    return options


def main() -> None:
    """Runs the demo in a lab, or on this machine where there can be none."""
    options = parse_options()
    problems = lab.lab_problems(needs_quotas=True) if os.geteuid() == 0 else tools.user_namespace_problems()
    if problems:
        sys.exit(train_here(options, problems))
    user_namespace.enter([sys.executable, *sys.orig_argv[1:]], starts=True)
    for name in ("gloo", "ringweave"):
        shutil.rmtree(options.out / name, ignore_errors=True)
    started_s = time.monotonic()
    with lab_up() as place:
        plan = print_plan()
        runs = [run_gloo(place, options), run_ringweave(place, options)]
        setting = demo_data.Setting(
            uplink="100 Mbit/s",
            limits=place.quota_kind or "",
            cpus={name: quota_us / QUOTA_PERIOD_US for name, quota_us in quotas_of(place).items()},
            plan=plan,
            batch=options.batch,
            steps=range(options.warm_up + 1, options.kill_after + 1),
            load=os.getloadavg()[0],
            num_cpus=len(os.sched_getaffinity(0)),
        )
    page = demo_page.write(options.out, setting, *runs)
    say(f"{page.sentence}\n{page.shares_sentence}")
    report = [*RINGWEAVE, "report", "--html", str(options.out / "page.html"), str(options.out / "ringweave")]
    subprocess.run([*report, "--preface", options.out / "preface.html"], stdout=subprocess.DEVNULL, check=True)
    say(f"The page: {options.out / 'page.html'} (and page.png), after {time.monotonic() - started_s:.0f} s")


def train_here(options: argparse.Namespace, problems: Sequence[str]) -> int:
    """Trains the first example on four workers of this machine, and says why there is no lab; returns the exit code."""
    say("There can be no lab on this machine, so the first example trains on it as it is.")
    run = [*RINGWEAVE, "run", "--workers", "4", "--run-dir", str(options.out), str(EXAMPLES / "01_train_text.py")]
    code = subprocess.run([*run, "--out", str(options.out), *options.script_options.split()], check=False).returncode
    say(
        "Missed: the racks, the thin uplink and the slow worker, the comparison with DDP on Gloo, the kill, and the "
        "page about them. On one machine small messages go to Gloo, which is faster there. To have the lab:"
    )
    print("\n".join(problems), flush=True)
    return code


def quotas_of(place: Lab) -> dict[str, int]:
    """Returns node -> microseconds of each 40 ms that its worker gets."""
    return {node: int(quotas[0] * QUOTA_FRACTION) for node, quotas in (place.quotas or {}).items()}


def limit(place: Lab, *, is_on: bool) -> None:
    """Gives the devices their quotas, or a whole processor each."""
    for node, quota_us in quotas_of(place).items():
        place.set_quota(node, 0, quota_us if is_on else QUOTA_PERIOD_US)


@contextlib.contextmanager
def lab_up() -> Iterator[Lab]:
    """A lab, which is taken down at the end, also if this process is killed."""
    place = lab.up(topology.load(CLUSTER), f"demo-{os.getpid()}", quotas="always")
    guard = ["/bin/sh", "-c", TAKE_DOWN, "rw-demo", sys.executable, place.name]
    with subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True) as taker:  # it waits for the end of us
        try:
            yield place
        finally:
            assert taker.stdin is not None
            taker.stdin.close()


def print_plan() -> str:
    """Prints and returns the plan for the gradients of the model; nothing runs for it."""
    say(f"The plan for {GRADIENTS_TEXT} of gradients, before anything runs:")
    command = [*RINGWEAVE, "plan", str(CLUSTER), "--bytes", GRADIENTS_TEXT]
    plan = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(plan, flush=True)
    return plan


def run_gloo(place: Lab, options: argparse.Namespace) -> demo_data.Run:
    """Trains with DDP on Gloo, under a torchrun on every node."""
    out = options.out / "gloo"
    (out / "logs").mkdir(parents=True)
    say("DDP on Gloo under torchrun:")
    nodes = place.cluster.nodes
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", "--nproc-per-node=1"]
    torchrun += [f"--master-addr={place.addresses[nodes[0].name][0]}", f"--master-port={MASTER_PORT}"]
    with contextlib.ExitStack() as stack:
        processes = []
        for index, node in enumerate(nodes):
            command = [*torchrun, f"--node-rank={index}", *script(options, out), "--ddp"]
            environ = {"GLOO_SOCKET_IFNAME": place.interfaces(node.name)[0], "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            log = stack.enter_context((out / "logs" / f"{node.name}.log").open("w"))
            processes.append(start(place.command(node.name, command, device=0), log, environ))
        return Watch(place=place, processes=processes, folder=out, options=options).follow("DDP on Gloo")


def run_ringweave(place: Lab, options: argparse.Namespace) -> demo_data.Run:
    """Trains with ringweave, which loses a worker in the midst."""
    out = options.out / "ringweave"
    (out / "logs").mkdir(parents=True)
    size = len(place.cluster.nodes)
    say(f"ringweave, with a kill -9 of rank {KILLED_RANK} after step {options.kill_after}:")
    run = ["lab", "run", "--lab", place.name, "--run-dir", str(out), "--elastic", f"{size - 1}:{size}"]
    limit(place, is_on=True)
    with (out / "logs" / "launcher.log").open("w") as log:
        process = start([*RINGWEAVE, *run, *script(options, out)], log, {})
        watch = Watch(place=place, processes=[process], folder=out, options=options, kills=True)
        return watch.follow("ringweave")


def script(options: argparse.Namespace, out: Path) -> list[str]:
    """Returns the script and its arguments, the same for both systems."""
    sizes = ["--steps", str(options.steps), "--batch", str(options.batch), *options.script_options.split()]
    return [str(SCRIPT), "--out", str(out.absolute()), *sizes]


def start(command: Sequence[str], log: object, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a process whose output goes to a file."""
    environ = {**os.environ, **QUIET, **environ}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)  # type: ignore[call-overload]


@dataclass(kw_only=True, slots=True)
class Watch:
    """Follows a run by the curve of rank 0: it limits the CPUs, reads the uplink's counters, and kills a worker."""

    place: Lab
    processes: "Sequence[subprocess.Popen[bytes]]"
    folder: Path
    options: argparse.Namespace
    kills: bool = False
    kill: demo_data.Kill | None = None
    counters: dict[int, dict[str, int]] = field(default_factory=dict)
    """Train step -> bytes on each link so far."""

    def follow(self, name: str) -> demo_data.Run:
        """Follows the run to its end.

        Raises:
            SystemExit: A process failed, or the run did not end; the last lines of its output are shown.
        """
        deadline, told, is_started = time.monotonic() + RUN_TIMEOUT_S, 0, False
        try:
            while any(process.poll() is None for process in self.processes):
                if not is_started and self.have_workers_started():
                    is_started = True  # importing torch at a tenth of a processor would take most of the demo
                    limit(self.place, is_on=False)
                train_step = demo_data.last_step(self.folder)
                if train_step is not None:
                    self.act(train_step)
                if train_step is not None and train_step >= told + 20:
                    told = train_step - train_step % 20
                    print(f"  step {train_step} of {self.options.steps}", flush=True)
                failed = [process for process in self.processes if process.poll() not in (None, 0)]
                if failed or time.monotonic() > deadline:
                    raise SystemExit(f"{name}: did not end well. The end of its output:\n{self.last_output()}")
                time.sleep(0.05)
        finally:
            for process in self.processes:
                process.terminate()
            for process in self.processes:
                process.wait()
        if any(process.returncode != 0 for process in self.processes):
            raise SystemExit(f"{name}: failed. The end of its output:\n{self.last_output()}")
        return demo_data.load_run(name, self.folder, self.counters, self.kill)

    def have_workers_started(self) -> bool:
        """Returns True once all workers run, which were told their quotas then: ringweave plans with these."""
        if not self.kills:
            return True
        return len(self.started_workers()) >= len(self.place.cluster.nodes)

    def started_workers(self) -> list[Mapping[str, Any]]:
        """Returns ringweave's events of workers that were started."""
        return [each for each in read_events(self.folder / "events.jsonl") if each["kind"] == "worker_started"]

    def act(self, train_step: int) -> None:
        """Does what is due at a train step."""
        options = self.options
        is_over = train_step >= options.steps
        is_due = not self.counters or train_step - max(self.counters) >= COUNTED_STEPS or is_over
        if is_due and train_step not in self.counters:
            limit(self.place, is_on=not is_over)
            self.counters[train_step] = self.place.bytes_on_links()
        if self.kills and self.kill is None and train_step >= options.kill_after:
            os.kill(self.killed_pid(), signal.SIGKILL)
            self.kill = demo_data.Kill(rank=KILLED_RANK, train_step=train_step, at_s=time.monotonic())
            print(f"  step {train_step}: rank {KILLED_RANK} is killed", flush=True)

    def killed_pid(self) -> int:
        """Returns the process id of the worker that is to be killed."""
        return next(each["pid"] for each in self.started_workers() if each["rank"] == KILLED_RANK)

    def last_output(self) -> str:
        """Returns the last lines of all logs."""
        logs = sorted((self.folder / "logs").iterdir())
        return "\n".join(f"{log.name}: {line}" for log in logs for line in log.read_text().splitlines()[-8:])


def say(text: str) -> None:
    """Prints a line apart from the output of runs."""
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
