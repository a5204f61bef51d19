"""Strangers at every port of a run that trains: callers without a valid certificate of it, and floods of connections.

    python bench/strangers.py                                       # needs root; 15 minutes
    python bench/strangers.py --kinds plain,elastic --seconds 10

Kinds: `plain` on one machine, where the stranger is another user; `elastic`, `ps-hra`, `local` and `pipeline` with
`--encrypt on` in a lab, where the stranger is one more machine on the switch; `hosts` by sshd. The kernel's tables name
the ports. Floods: 2,000 idle connections at each port, 10,000 connections per second at all of them, and connections
that say a byte per second. Before each, an equal flood calls a port in the run's network that has nothing to do with
the run. Measured: the longest train step of any rank. Then callers with no, foreign, another job's, an expired and a
revoked certificate come to each port.

Exit code 1 if a worker ends, a step takes more than twice the longest beside the unrelated flood, descriptors stay
open, a caller is admitted, or a refusal is not in the log.
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import resource
import selectors
import signal
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

FILE = Path(__file__).absolute()
SELF = [sys.executable, str(FILE)]
RINGWEAVE = [*SELF, "launch"]
FLAGS = {
    "plain": ["run", "--workers", "2", "--mode", "balanced"],
    "elastic": ["--mode", "balanced", "--elastic", "1:2"],
    "ps-hra": ["--mode", "ps-hra", "--elastic", "1:2"],
    "local": ["--mode", "local"],
    "pipeline": [],
    "hosts": ["run", "--hosts", "n0,n1", "--name", "strangers", "--mode", "balanced"],
}
EXPELLING = ("elastic", "ps-hra")
"""Kinds in which a worker is killed first, so that its certificate is revoked."""
NUM_IDLE, RATE, NUM_SLOW, HOLD_S, STEP_S = 2000, 10_000, 200, 1.0, 0.05
WINDOW, ROUND = 128, 16
"""Connections of a flood that are open at once, and those between two looks at the clock."""
AS_NOBODY, NOBODY, STRANGER, SSH = "as-nobody", 65534, "10.99.250.1", 22
CLUSTER = "name: strangers\nnodes:\n  - {name: n, nic: 1Gbit/s, devices: 1, count: 2}\nlatency: 50us\n"
READ_NOTHING = {"certificate", "revoked", "handshake", "deadline", "connection", "full", "identity"}
"""Reasons of refusals before anything that a caller says is looked at."""
Target = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a run is, and the stranger."""

    command: Sequence[str]
    """Command of the run, with its script."""
    folder: Path
    """Folder of the run's files, as this process sees it."""
    workers_folder: str
    """The same for the workers."""
    start: Callable[[Sequence[str]], "subprocess.Popen[Any]"]
    inside: Callable[[Sequence[str]], Sequence[str]]
    """Command in the network of the run's first node."""
    outside: Callable[[Sequence[str]], Sequence[str]]
    """Command of the stranger."""
    own_address: str
    """Address of the first node."""
    caller: str
    """Address of the stranger."""
    pids: Callable[[], list[int]]
    """Processes of the run."""
    ports: Callable[[], list[Target]]
    """Ports of the run that the stranger reaches."""
    logs: Callable[[], str]
    """Logs in which refusals stand."""
    is_secured: bool
    """Its ports need certificates."""
    output: Path
    """What the run's command prints."""


def main() -> None:
    """Run the bench, or be a part of it."""
    parts = {
        "launch": launch,
        "train": train,
        "pipeline": train_pipeline,
        "serve": serve,
        "flood": flood,
        "knock": knock,
    }
    if sys.argv[1:2] == [AS_NOBODY]:
        become_nobody()
        del sys.argv[1]
    if sys.argv[1:2] and sys.argv[1] in parts:
        parts[sys.argv[1]](sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(FLAGS))
    parser.add_argument("--seconds", type=float, default=30.0, help="of the flood of connections")
    parser.add_argument("--out", type=Path, default=Path("runs/strangers"))
    options = parser.parse_args()
    places = {"plain": on_one_machine, "hosts": on_hosts}
    rows = []
    for kind in options.kinds.split(","):
        folder = (options.out / kind).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with places.get(kind, in_a_lab)(kind, folder) as place:
            rows.append(examine(kind, place, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
    (options.out / "strangers.json").write_text(json.dumps({"measured": rows}, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row["faults"] for row in rows))


def examine(kind: str, place: Place, seconds: float) -> dict[str, Any]:
    """Run one kind, and let the strangers come."""
    script = "pipeline" if kind == "pipeline" else "train"
    with place.start([*place.command, script, place.workers_folder]) as run, ExitStack() as stack:
        stack.callback(end_run, run)
        wait_training(place, run)
        if kind in EXPELLING:
            os.kill(next(pid for pid, name in workers_of(place).items() if name == "1.0"), signal.SIGKILL)
            time.sleep(3.0)
            wait_training(place, run)
        time.sleep(3.0)
        ports, workers = place.ports(), workers_of(place)
        row: dict[str, Any] = {"kind": kind, "ports": len(ports), "quiet": step_times(place, time.time() - 3.0)}
        faults: list[str] = []
        unrelated = stack.enter_context(started(place.inside([*SELF, "serve", place.own_address])))
        before = count_descriptors(place)
        for name in ("idle", "slow", "connects"):
            length_s = seconds if name == "connects" else min(10.0, seconds)
            row[name] = measure_flood(place, name, [(place.own_address, unrelated)], ports, length_s)
            print(kind, name, json.dumps(row[name]), flush=True)
            steps = row[name]["steps"]
            usual = row[name]["steps_unrelated"]
            if not steps["num"] or steps["longest_s"] > 2 * usual["longest_s"]:
                faults.append(f"{name}: a step of {steps['longest_s']} s")
        if kind not in EXPELLING:
            (place.folder / "issued" / "revoked").unlink(missing_ok=True)
        row["knocks"] = knock_everywhere(place, ports, faults)
        row["descriptors"] = [before, after := wait_descriptors(place, before)]
        faults += [f"{after - before} descriptors stay open"] if after > before + 2 else []
        if run.poll() is not None or workers != workers_of(place):
            faults.append("a worker has ended")
        if not step_times(place, time.time() - 2.0)["num"]:
            faults.append("it trains no more")
    return row | {"faults": faults}


def measure_flood(
    place: Place, name: str, unrelated: Sequence[Target], ports: Sequence[Target], seconds: float
) -> dict[str, Any]:
    """Flood the unrelated port as often as there are ports of the run, then these."""
    found: dict[str, Any] = {}
    for key, targets in (("_unrelated", [unrelated[0]] * len(ports)), ("", ports)):
        began_s = time.time()
        words = [name, str(seconds), *(f"{host}:{port}" for host, port in targets)]
        done = subprocess.run(
            place.outside([*SELF, "flood", *words]), stdout=subprocess.PIPE, check=True, timeout=600, cwd="/"
        )
        found |= {f"flood{key}": json.loads(done.stdout), f"steps{key}": step_times(place, began_s)}
        time.sleep(1.0)
    return found


def knock_everywhere(place: Place, ports: Sequence[Target], faults: list[str]) -> dict[str, int]:
    """Let callers without a valid certificate come to each port; return how often each outcome was seen."""
    words = [f"{host}:{port}" for host, port in ports]
    secrets_folder = str(place.folder / "issued") if place.is_secured else "/nowhere"
    done = subprocess.run(
        place.outside([*SELF, "knock", secrets_folder, *words]),
        stdout=subprocess.PIPE,
        check=True,
        timeout=600,
        cwd="/",
    )
    counts: dict[str, int] = {}
    for each in json.loads(done.stdout):
        counts[f"{each['who']}: {each['outcome']}"] = counts.get(f"{each['who']}: {each['outcome']}", 0) + 1
        if each["outcome"] == "admitted":
            faults.append(f"{each['who']} is admitted at {each['port']}")
    time.sleep(1.0)
    text = place.logs()
    reasons = set(re.findall(rf'"peer": ?"{re.escape(place.caller)}:\d+", ?"reason": ?"(\w+)"', text))
    reasons |= set(re.findall(rf"refused {re.escape(place.caller)}:\d+ \((\w+)", text))
    if place.is_secured and "certificate" not in reasons:
        faults.append("no refusal is in the log")
    if reasons - READ_NOTHING:
        faults.append(f"refused late: {sorted(reasons - READ_NOTHING)}")
    return counts | {f"logged as {each}": 1 for each in sorted(reasons)}


# Places.


@contextmanager
def on_one_machine(kind: str, folder: Path) -> Iterator[Place]:
    """Yield a place on loopback; the stranger is another user."""
    import psutil

    from ringweave.cli import doctor

    run_dir, started_pids = folder / "run", list[int]()

    def start(argv: Sequence[str]) -> "subprocess.Popen[Any]":
        soft = f"ulimit -Sn 1024; exec {' '.join(argv)}"
        run = subprocess.Popen(["sh", "-c", soft], stdout=(folder / "output.log").open("wb"), stderr=subprocess.STDOUT)
        started_pids.append(run.pid)
        return run

    yield Place(
        command=[*RINGWEAVE, str(folder), *FLAGS[kind], "--run-dir", str(run_dir), str(FILE)],
        folder=folder,
        workers_folder=str(folder),
        start=start,
        inside=lambda argv: argv,
        outside=lambda argv: [*SELF, AS_NOBODY, *argv[len(SELF) :]],
        own_address="127.0.0.1",
        caller="127.0.0.1",
        pids=lambda: [each.pid for each in psutil.Process(started_pids[0]).children(recursive=True)],
        ports=lambda: [(each.address.removeprefix("::ffff:"), each.port) for each in doctor.find_ports(run_dir)],
        logs=lambda: (run_dir / "events.jsonl").read_text(encoding="utf-8"),
        is_secured=False,
        output=folder / "output.log",
    )


@contextmanager
def in_a_lab(kind: str, folder: Path) -> Iterator[Place]:
    """Yield a lab of two nodes, with one more machine on its switch."""
    from ringweave import lab, topology
    from ringweave_bench.lab_workers import extra_machine

    name, run_dir = f"strangers-{os.getpid()}", folder / "run"
    found = lab.up(topology.loads(CLUSTER), name)
    with ExitStack() as stack:
        stack.callback(lab.down, name)
        as_stranger = stack.enter_context(extra_machine(found, STRANGER))
        nodes = [node.name for node in found.cluster.nodes]
        yield Place(
            command=[
                *(*RINGWEAVE, str(folder), "lab", "run", "--lab", name, *FLAGS[kind]),
                *("--encrypt", "on", "--run-dir", str(run_dir), str(FILE)),
            ],
            folder=folder,
            workers_folder=str(folder),
            start=lambda argv: subprocess.Popen(
                argv, stdout=(folder / "output.log").open("wb"), stderr=subprocess.STDOUT
            ),
            inside=lambda argv: found.command(nodes[0], argv),
            outside=as_stranger,
            own_address=found.addresses[nodes[0]][0],
            caller=STRANGER,
            pids=lambda: [pid for pids in lab.find(name).processes().values() for pid in pids],
            ports=lambda: [port for node in nodes for port in kernel_ports(found.command(node, ["cat"]))],
            logs=lambda: (run_dir / "events.jsonl").read_text(encoding="utf-8"),
            is_secured=True,
            output=folder / "output.log",
        )


@contextmanager
def on_hosts(kind: str, folder: Path) -> Iterator[Place]:
    """Yield three machines with sshd; the third is the stranger."""
    from ringweave_bench.ssh_lab import ssh_lab

    home = "/home/trainer"
    with ssh_lab(num_nodes=3) as lab:
        first, second, stranger = lab.nodes
        output = (folder / "output.log").open("wb")
        first.write(f"{home}/project/job.py", FILE.read_text(encoding="utf-8"))

        def as_stranger(argv: Sequence[str]) -> Sequence[str]:
            return lab.network.command(stranger.name, argv)

        yield Place(
            command=[*RINGWEAVE, home, *FLAGS[kind], "job.py"],
            folder=first.path(home),
            workers_folder="/tmp",
            start=lambda argv: first.popen(
                ["sh", "-c", f"cd project; exec {' '.join(argv)}"], stdout=output, stderr=output
            ),
            inside=lambda argv: lab.network.command(first.name, argv),
            outside=as_stranger,
            own_address=first.address,
            caller=stranger.address,
            pids=lambda: [each.pid for node in (first, second) for each in node.processes()],
            ports=lambda: [
                each for node in (first, second) for each in kernel_ports(lab.network.command(node.name, ["cat"]))
            ],
            logs=lambda: "".join(
                path.read_text(encoding="utf-8", errors="replace")
                for node in (first, second)
                for pattern in ("service.log", "relay.log", "events.jsonl")
                for path in node.path(home).rglob(pattern)
            ),
            is_secured=True,
            output=folder / "output.log",
        )


def kernel_ports(cat: Sequence[str]) -> list[Target]:
    """Return what listens in a node, as its kernel says, but on loopback and sshd's."""
    text = subprocess.run(
        [*cat, "/proc/net/tcp", "/proc/net/tcp6"], stdout=subprocess.PIPE, check=False, text=True
    ).stdout
    found = set()
    for row in map(str.split, text.splitlines()):
        if row[3] == "0A":
            host, _, port = row[1].rpartition(":")
            address = socket.inet_ntoa(struct.pack("=I", int(host[-8:], 16)))
            if not address.startswith("127.") and int(port, 16) != SSH:
                found.add((address, int(port, 16)))
    return sorted(found)


# Observation.


def workers_of(place: Place) -> dict[int, str]:
    """Return process id -> name of each worker: it has its file of steps open."""
    found = {}
    for pid in place.pids():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if matched := re.search(r"/steps-([0-9.]+)-", str(entry.readlink())):
                    found[pid] = matched[1]
    return found


def step_files(place: Place) -> list[Path]:
    """Return the files that workers write; those of hosts are on the disk of each."""
    if place.workers_folder != "/tmp":
        return sorted(place.folder.glob("steps-*"))
    roots = {Path(f"/proc/{pid}/root/tmp") for pid in workers_of(place)}
    return [path for root in sorted(roots) for path in root.glob("steps-*")]


def step_times(place: Place, since_s: float) -> dict[str, float]:
    """Return number, median and longest of all steps of all workers since a time."""
    gaps, now_s = [], time.time()
    for path in step_files(place):
        times = [float(line) for line in path.read_text(encoding="ascii").split()]
        if times and times[-1] > now_s - 60.0:
            gaps += [later - at for at, later in itertools.pairwise(times) if later > since_s]
    return {
        "num": len(gaps),
        "median_s": round(statistics.median(gaps), 4) if gaps else 0.0,
        "longest_s": round(max(gaps), 4) if gaps else 0.0,
    }


def wait_training(place: Place, run: "subprocess.Popen[Any]") -> None:
    """Wait until two workers have done ten steps in the last seconds."""
    until_s = time.monotonic() + 150
    while True:
        since_s, recent = time.time() - 5.0, 0
        for path in step_files(place):
            recent += len([1 for line in path.read_text(encoding="ascii").split() if float(line) > since_s]) > 10
        if recent >= 2:
            return
        if run.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(place.output.read_text(encoding="utf-8", errors="replace")[-4000:])
        time.sleep(0.5)


def count_descriptors(place: Place) -> int:
    """Count the descriptors of all processes of the run."""
    total = 0
    for pid in place.pids():
        with contextlib.suppress(OSError):
            total += len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    return total


def wait_descriptors(place: Place, before: int) -> int:
    """Wait until as many descriptors are open as before, or half a minute; return their number."""
    until_s = time.monotonic() + 30
    while (after := count_descriptors(place)) > before + 2 and time.monotonic() < until_s:
        time.sleep(0.5)
    return after


@contextmanager
def started(argv: Sequence[str]) -> Iterator[int]:
    """Yield the port of the unrelated service."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def end_run(run: "subprocess.Popen[Any]") -> None:
    """End the run as Ctrl-C does."""
    run.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(30)
    run.kill()


# Parts of the run.


def launch(words: Sequence[str]) -> None:
    """Be `ringweave`, and keep certificates that strangers would have stolen: expired ones, and of first members."""
    from ringweave.cli.main import main as run_ringweave
    from ringweave.rpc import tls

    folder = Path(words[0]) / "issued"
    make = tls.CertificateAuthority.__init__

    @functools.wraps(make)
    def keep(self: tls.CertificateAuthority, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        with contextlib.suppress(FileExistsError):
            self.issue("worker", "1.0").save(folder / "revoked")
            clock, self._clock = self._clock, lambda: tls.utc_now() - tls.CERTIFICATE_LIFETIME - timedelta(days=1)
            self.issue("worker", "0.0").save(folder / "expired")
            self._clock = clock

    for path in folder.glob("*"):
        path.unlink()
    tls.CertificateAuthority.__init__ = keep  # type: ignore[method-assign]
    run_ringweave(list(words[1:]))


def train(words: Sequence[str]) -> None:
    """Train until the end of the run; a step computes for 50 ms."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import ringweave

    model: Any = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader: Any = DataLoader(TensorDataset(torch.randn(4096, 256)), batch_size=16)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
    with step_log(words[0]) as done:
        for _epoch in range(10_000):
            for (x,) in loader:
                time.sleep(STEP_S)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                done()


def train_pipeline(words: Sequence[str]) -> None:
    """Train a pipeline until the end of the run."""
    import torch
    from torch import nn

    from ringweave import pipeline

    settings = pipeline.Settings(num_microbatches=4)
    model = pipeline.Pipeline(
        [nn.Linear(256, 256) for _ in range(6)],
        nn.functional.mse_loss,
        lambda block: torch.optim.SGD(block.parameters(), lr=1e-4),
        torch.empty(32, 256, device="meta"),
        settings,
    )
    with step_log(words[0]) as done:
        while True:
            time.sleep(STEP_S)
            model.train_step(torch.randn(32, 256), target=torch.zeros(32, 256))
            done()


@contextmanager
def step_log(folder: str) -> Iterator[Callable[[], None]]:
    """Yield a function that notes the end of a step."""
    name = os.environ.get("RINGWEAVE_MEMBER") or os.environ["RANK"]
    with (Path(folder) / f"steps-{name}-{time.time_ns()}").open("w", encoding="ascii") as file:

        def done() -> None:
            file.write(f"{time.time():.4f}\n")
            file.flush()

        yield done


# Strangers.


def serve(words: Sequence[str]) -> None:
    """Accept connections that have nothing to do with a run, until killed."""
    raise_limit()
    listener = socket.create_server((words[0], 0), backlog=1024)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                with contextlib.suppress(OSError):
                    if key.fileobj is listener:
                        sock, _ = listener.accept()
                        sock.setblocking(False)
                        selector.register(sock, selectors.EVENT_READ)
                    elif isinstance(key.fileobj, socket.socket) and not read_quietly(key.fileobj):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()


def read_quietly(sock: socket.socket) -> bytes:
    """Return what has come; nothing at the end."""
    with contextlib.suppress(OSError):
        return sock.recv(4096)
    return b""


def flood(words: Sequence[str]) -> None:
    """Flood ports; print how many connections were asked for and opened, and how many were opened per second."""
    raise_limit()
    kind, seconds = words[0], float(words[1])
    targets = [(word.rpartition(":")[0], int(word.rpartition(":")[2])) for word in words[2:]]
    started_s = time.monotonic()
    kinds = {"idle": idle_connections, "slow": slow_connections, "connects": many_connections}
    num_asked, num_opened = kinds[kind](targets, seconds)
    spent_s = time.monotonic() - started_s
    found = {
        "asked": num_asked,
        "connections": num_opened,
        "per_s": round(num_opened / spent_s),
        "s": round(spent_s, 1),
    }
    print(json.dumps(found))


def idle_connections(targets: Sequence[Target], _: float) -> tuple[int, int]:
    """Hold idle connections at each port in turn."""
    num_opened = 0
    for target in targets:
        held = [open_connection(target) for _ in range(NUM_IDLE)]
        time.sleep(HOLD_S)
        for sock in held:
            num_opened += is_connected(sock)
            sock.close()
    return NUM_IDLE * len(targets), num_opened


def slow_connections(targets: Sequence[Target], seconds: float) -> tuple[int, int]:
    """Hold connections that say a byte per second."""
    held = [open_connection(targets[at % len(targets)]) for at in range(NUM_SLOW)]
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(1.0)
        for sock in held:
            with contextlib.suppress(OSError):
                sock.send(b"\x16")
    return NUM_SLOW, sum(map(is_connected, held))


def many_connections(targets: Sequence[Target], seconds: float) -> tuple[int, int]:
    """Open connections at all ports in turn, at most RATE per second; each is reset when its socket has its turn again.

    A connection costs three system calls, and one of them looks at it: `connect` to no family resets a connection, and
    its socket connects again, with the same descriptor and settings.
    """
    connect = ctypes.CDLL(None).connect
    family = struct.pack("=H", socket.AF_INET)
    addresses = [family + struct.pack("!H4s8x", port, socket.inet_aton(host)) for host, port in targets]
    nowhere, length = struct.pack("=H14x", socket.AF_UNSPEC), len(addresses[0])
    window = [socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(WINDOW)]
    num_asked, num_opened, started_s = 0, 0, time.monotonic()
    while (now_s := time.monotonic() - started_s) < seconds:
        if num_asked > now_s * RATE:
            time.sleep(0.001)
            continue
        for sock in window[num_asked % WINDOW :][:ROUND]:
            num_opened += num_asked >= WINDOW and is_connected(sock)
            connect(sock.fileno(), nowhere, length)
            connect(sock.fileno(), addresses[num_asked % len(addresses)], length)
            num_asked += 1
    for sock in window:
        num_opened += is_connected(sock)
        connect(sock.fileno(), nowhere, length)
        sock.close()
    return num_asked, num_opened


def open_connection(target: Target) -> socket.socket:
    """Begin to connect; closing resets the connection, so that no port of this end stays used."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.setblocking(False)
    sock.connect_ex(target)
    return sock


def is_connected(sock: socket.socket) -> bool:
    """Return whether the other end's kernel has answered, and has not refused."""
    with contextlib.suppress(OSError):
        return bool(sock.getpeername())
    return False


def become_nobody() -> None:
    """Become another user, who may not even read this Python; what is needed is loaded before."""
    import ringweave.membership.messages  # noqa: F401

    call_as("no certificate", None, ("localhost", 1))
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def raise_limit() -> None:
    """Open as many descriptors as the machine allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def knock(words: Sequence[str]) -> None:
    """Call each port as each kind of stranger; print the outcomes."""
    from ringweave import rpc

    callers: dict[str, rpc.Credentials | None] = {
        "no certificate": None,
        "foreign": rpc.CertificateAuthority("job").issue("worker", "0"),
        "another job": rpc.CertificateAuthority("other").issue("worker", "0.0"),
    }
    folder = Path(words[0])
    for name in ("expired", "revoked"):
        if (folder / name).exists():
            callers[name] = rpc.Credentials.load(folder / name)
    found = []
    for word in words[1:]:
        host, _, port = word.rpartition(":")
        for who, credentials in callers.items():
            outcome = call_as(who, credentials, (host, int(port)))
            found.append({"who": who, "port": word, "outcome": outcome})
    print(json.dumps(found))


def call_as(who: str, credentials: Any, target: Target) -> str:
    """Return `refused`, `silence`, or `admitted` where the other end takes what a stranger says."""
    if who == "revoked":
        return call_as_member(credentials, target)
    context = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if credentials is None else credentials.tls_context(is_server=False)
    )
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(target, timeout=2.0) as raw, context.wrap_socket(raw) as sock:
            sock.sendall(bytes(64))
            return "admitted" if sock.recv(64) else "refused"
    except TimeoutError:
        return "silence"
    except OSError:
        return "refused"


def call_as_member(credentials: Any, target: Target) -> str:
    """Call as a member that was expelled, with its own certificate; a coordinator may tell it so."""
    from ringweave import rpc
    from ringweave.errors import RefusedError, RingweaveError
    from ringweave.membership.messages import MembershipWatch

    outcome, authentication = "silence", rpc.TlsAuthentication(credentials)
    for role in ("coordinator", "server", "worker"):
        try:
            with rpc.RpcClient.connect(*target, authentication, role=role, timeout_s=4.0) as client:
                if role != "coordinator":
                    return "admitted"
                update = client.call(MembershipWatch(revision=0), timeout_s=4.0).message
                if not update.is_active and update.directive.membership is None and not update.directive.is_evicted:
                    return "not known to a standby"
                return "told that it is expelled" if update.directive.is_evicted else "admitted"
        except RefusedError as error:
            if "no member any more" in str(error):
                return "refused"
        except (RingweaveError, OSError) as error:
            outcome = "silence" if "time" in str(error) else "refused"
    return outcome


if __name__ == "__main__":
    main()
