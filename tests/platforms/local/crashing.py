"""Lives of a job whose supervisor is killed with SIGKILL at one boundary after the other; prints a JSON line for each.

    python crashing.py FOLDER LIFE STEP

The first life has no crash and names all boundaries: `NAME#1` is the first time that one is reached. Each further life
is killed at another one; a STEP of 3 takes every third boundary. A process of its own, so that it may fork: everything
is imported once, and a supervisor starts in a millisecond.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from ringweave.jobs import admission
from ringweave.jobs.records import Job, new_job
from ringweave.jobs.request import DeletionPolicy, JobRequest, NodeRequest
from ringweave.launcher import processes
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_folder import REGISTRY
from ringweave.platforms.local.registry import LocalJobRegistry, LocalRegistryEntry
from ringweave.platforms.local.supervisor import JobSupervisor
from ringweave.platforms.submission import JobOrigin

LIGHT = Path(__file__).with_name("light_agent.py")
DEADLINE_S = 300.0


ASKS = {
    "ends": (),
    "asked": (("Running", 2, "suspend"), ("Suspended", 3, "resume"), ("Running", 3, "stop"), ("Stopped", 3, "delete")),
    "fails": (("Failed", 2, "retry"), ("Failed", 4, "delete")),
}
"""By life: (state, round, verb), what somebody asks of the job when it has come to that, in order."""


def job_of(life: str) -> Job:
    """`ends`: it succeeds, and all is removed. `asked`: it is suspended, resumed, stopped and deleted; groups stay.

    `fails`: a node is lost more often than it may; tried again, its script fails; deleted. One node stays after that.
    """
    policies = {
        "ends": (DeletionPolicy.DELETE, DeletionPolicy.DELETE),
        "asked": (DeletionPolicy.KEEP, DeletionPolicy.KEEP),
        "fails": (DeletionPolicy.KEEP_ON_FAILURE, DeletionPolicy.DELETE),
    }[life]
    nodes = tuple(
        NodeRequest(name=f"n{index}", capacity=3, deletion=policy, max_retries=1)
        for index, policy in enumerate(policies)
    )
    ttl_s = 0.0 if life == "ends" else None
    request = JobRequest(name="job", num_workers=6, script="s.py", nodes=nodes, device="cpu", ttl_s=ttl_s)
    return new_job(request, requester="ann", counts=(3, 3), now=time.time())


class Life:
    """One life of one job, in a folder of its own."""

    def __init__(self, folder: Path, life: str) -> None:
        folder.mkdir(parents=True)
        self.state, self.ledger, self.life = folder / "state", folder / "ledger", life
        self.registry = LocalJobRegistry(self.state / REGISTRY)
        self.boundaries, self.last_record = folder / "boundaries", folder / "last_record"
        self.boundaries.touch()
        origin = JobOrigin(directory=str(folder), script_text="", environ={"LIFE": life})
        job = job_of(life)
        self.registry.insert(LocalRegistryEntry(id="job-1", job=job, origin=origin), lambda _: job)

    def supervise(self, crash_at: str) -> bool:
        """Run a supervisor in a process of its own; whether it killed itself."""
        pid = os.fork()
        if pid == 0:
            os._exit(self._serve(crash_at))
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, f"the supervisor got {os.WTERMSIG(status)}"
            return True
        assert os.WEXITSTATUS(status) == 0, "the supervisor failed"
        return False

    def on_boundary(self) -> list[str]:
        """The boundaries so far, each with how often it was reached by then."""
        names = self.boundaries.read_text().splitlines()
        return [f"{name}#{names[: index + 1].count(name)}" for index, name in enumerate(names)]

    def _serve(self, crash_at: str) -> int:

        def die(boundary: str) -> None:
            with self.boundaries.open("a") as log:
                log.write(f"{boundary}\n")
            if boundary == "before ForgetJob":
                self._note_record()
            if self.on_boundary()[-1] == crash_at:
                os.kill(os.getpid(), signal.SIGKILL)

        agent = (sys.executable, "-I", "-S", str(LIGHT), str(self.ledger))
        try:
            JobSupervisor(self.state, "job-1", agent=agent, on_boundary=die).serve()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            return 1
        return 0

    def _note_record(self) -> None:
        """Keep what the job came to: it is about to be forgotten."""
        entry = self.registry.find_by_id("job-1")
        if entry is not None:
            retries = [node.retries for node in entry.job.record.nodes]
            self.last_record.write_text(json.dumps({"outcome": entry.job.record.outcome, "retries": retries}))

    def lead(self, crash_at: str = "") -> dict[str, object]:
        """Lead the job to its end, with a crash on the way; what was seen."""
        deadline = time.monotonic() + DEADLINE_S
        asker = self._start_asker() if ASKS[self.life] else None
        has_crashed = False
        while self.registry.find_by_id("job-1") is not None and time.monotonic() < deadline:
            has_crashed = self.supervise(crash_at) or has_crashed
            time.sleep(0.005)
        if asker is not None:
            os.waitpid(asker, 0)
        return {"crash_at": crash_at, "has_crashed": has_crashed, **self.end()}

    def _start_asker(self) -> int:
        """Somebody who asks something of the job whenever it has come to that; its process id."""
        pid = os.fork()
        if pid:
            return pid
        deadline = time.monotonic() + DEADLINE_S
        todo, folder = list(ASKS[self.life]), job_folder.job_folder(self.state, "job-1")
        while todo and time.monotonic() < deadline:
            entry = self.registry.find_by_id("job-1")
            if entry is None:
                break
            state, round_, verb = todo[0]
            is_at_rest = state != "Suspended" or not folder.rendezvous.exists()  # else not every life deletes it
            if (entry.job.record.state, entry.job.record.round) == (state, round_) and is_at_rest:
                self.registry.update_desired(
                    "job-1", lambda job, _, verb=verb: admission.apply_verb(verb, job, time.time())
                )
                job_folder.notify(folder.wakeup)
                todo.pop(0)
            time.sleep(0.005)
        os._exit(0)

    def end(self) -> dict[str, object]:
        """The end state, when all processes have had time to go."""
        deadline = time.monotonic() + DEADLINE_S
        while (left := self._agents()) and time.monotonic() < deadline:
            time.sleep(0.01)
        files = sorted(path.name for path in (self.state / "jobs").glob("*")) if (self.state / "jobs").exists() else []
        last_record = json.loads(self.last_record.read_text()) if self.last_record.exists() else {}
        return {
            "processes": len(left),
            "files": files,
            "is_forgotten": self.registry.find_by_id("job-1") is None,
            "outcome": last_record.get("outcome"),
            "retries": last_record.get("retries"),
            "ledger": self.ledger.read_text().splitlines(),
        }

    def _agents(self) -> list[int]:
        while True:  # orphans of killed supervisors are ours
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        mine = []
        for process in psutil.Process().children(recursive=True):
            try:
                if str(self.state) in " ".join(process.cmdline()):
                    mine.append(process.pid)
            except psutil.Error:
                continue
        return mine


def main(folder: Path, kind: str, step: int) -> None:
    processes.adopt_orphans()
    first = Life(folder / "0", kind)
    seen = first.lead()
    print(json.dumps({**seen, "boundaries": first.on_boundary()}), flush=True)
    for index, crash_at in list(enumerate(first.on_boundary(), 1))[::step]:
        print(json.dumps(Life(folder / str(index), kind).lead(crash_at)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
