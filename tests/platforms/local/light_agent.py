"""An agent that starts in milliseconds and has no workers; it speaks the files of `platforms/local/job_folder.py`.

    python -I -S light_agent.py LEDGER JOB_FOLDER NODE ATTEMPT

In the first round the first attempt of node 1 fails, by the place's doing; from the second round on all finish
(LIFE=ends), or run until they are told to leave (asked). With LIFE=fails the second attempt of node 1 fails so too, and
when it is tried again, in the fourth round, the script of node 0.
Everything that happens is appended to LEDGER, which says afterwards who ran beside whom.
"""

import json
import os
import sys
import time
from pathlib import Path

LIFE_S = 400.0
"""A bound for what nobody ended."""
LOST = {"ends": (1,), "asked": (1,), "fails": (1, 2)}
"""By life: the rounds in which node 1 is lost."""


class Light:
    def __init__(self, ledger: str, root: str, node: str, attempt: str) -> None:
        self.ledger, self.root = ledger, Path(root)
        self.node, self.attempt = node, attempt
        self.folder = self.root / "groups" / f"{node}.{attempt}"
        self.round, self.life = 0, os.environ["LIFE"]

    def note(self, what: str) -> None:
        line = f"{what} {self.node} {self.attempt} {self.round}\n"
        descriptor = os.open(self.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def tell(self, phase: str, **more: object) -> None:
        report = {
            "round": self.round,
            "phase": phase,
            "pid": os.getpid(),
            "master_address": {"host": "here", "port": 1},
        }
        beside = self.folder / f".report.{os.getpid()}"
        try:
            beside.write_text(json.dumps(report | more))
            beside.rename(self.folder / "status.json")
            bell = os.open(self.root / "wakeup", os.O_WRONLY | os.O_NONBLOCK)
            os.write(bell, b"!")
            os.close(bell)
        except OSError:  # nobody listens, or the folder is gone
            pass

    def read(self, path: Path) -> dict:
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return {}

    def serve(self) -> None:
        is_running = False
        deadline = time.monotonic() + LIFE_S
        while time.monotonic() < deadline:
            orders = self.read(self.folder / "desired.json")
            if not orders or orders["stop"]:
                self.tell("Stopped", ended_s=time.time())
                return
            if orders["round"] > self.round:
                self.round, is_running = orders["round"], False
                self.note("ready")
                self.tell("Ready")
            elif not is_running and self.read(self.root / "rendezvous.json").get("round", 0) == self.round:
                is_running = True
                self.note("running")
                self.tell("Running")
            elif is_running and self.node == "1" and self.round in LOST[self.life] and self.round == int(self.attempt):
                self.tell("Failed", cause="Platform", text="killed by the test", ended_s=time.time())
                return
            elif is_running and self.node == "0" and self.round == 4 and self.life == "fails":
                self.tell("Failed", cause="Program", text="ended with exit code 3", exit_code=3, ended_s=time.time())
                return
            elif is_running and self.round > 1 and self.life == "ends":
                self.tell("Succeeded", exit_code=0, ended_s=time.time(), iterations=7, last_loss=0.5)
                return
            time.sleep(0.005)


if __name__ == "__main__":
    light = Light(*sys.argv[1:])
    light.note("begin")
    light.serve()
    light.note("end")
