"""A machine on the network of a run that wants a rank's place, or to feed it a pickle; real processes and sockets."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave import lab, topology
from ringweave.telemetry import read_events
from ringweave_bench.lab_workers import extra_machine

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CLUSTER = "name: pair\nnodes:\n  - {name: n, nic: 1Gbit/s, devices: 1, count: 2}\n"
ADDRESS = "10.99.250.1"
WORK = """
    import torch, torch.distributed as dist
    from pathlib import Path
    dist.init_process_group()
    folder = Path(sys.argv[1])
    print("place", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
    go_on = torch.ones(1)
    while go_on.item():
        found = [None, None]
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": 0}, {"rank": 1}], found
        message = torch.full((100_000,), rank + 1.0)
        dist.all_reduce(message)
        assert bool((message == 3.0).all())
        group = dist.new_group(backend="gloo")  # meets in the store and in Gloo
        dist.barrier(group)
        dist.destroy_process_group(group)
        time.sleep(0.5)
        go_on = torch.tensor([0.0 if (folder / "stop").exists() else 1.0])
        dist.broadcast(go_on, 0)
    print("right", flush=True)
"""
ATTACK = """
import datetime, json, socket, sys
from concurrent.futures import ThreadPoolExecutor
import torch.distributed as dist
store, ports, pickled = json.loads(sys.argv[1]), json.loads(sys.argv[2]), bytes.fromhex(sys.argv[3])
def take_place():
    try:
        found = dist.TCPStore(*store, is_master=False, timeout=datetime.timedelta(seconds=5))
        found.set("default_pg/0//native//rank/1", b"me")
    except Exception as error:
        return f"refused: {error}"
    return "taken"
def feed(port):
    try:
        with socket.create_connection(port, timeout=3) as sock:
            for _ in range(3):
                sock.sendall(len(pickled).to_bytes(8, "little") + pickled)
            return sock.recv(64).hex()
    except OSError as error:
        return type(error).__name__
with ThreadPoolExecutor(len(ports)) as threads:
    print(json.dumps({"store": take_place(), "answers": list(threads.map(lambda port: feed(tuple(port)), ports))}))
"""


class Evil:
    """A pickle that makes a folder where it is read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(
    ("encrypt", "expected"), [pytest.param("off", "taken", marks=pytest.mark.thorough), ("on", "refused")]
)
def test_a_stranger_takes_no_place_and_no_rank_reads_its_pickle(
    start: Callable, script: Callable, lab_name: str, tmp_path: Path, encrypt: str, expected: str
) -> None:
    place = lab.up(topology.loads(CLUSTER), lab_name)
    evil = tmp_path / "evil"
    with extra_machine(place, ADDRESS) as as_stranger:
        run = start("--encrypt", encrypt, script(WORK), str(tmp_path), verb=("lab", "run", "--lab", lab_name))
        run.wait_printed("place ", times=2)
        where = next(line for line in run.stdout.splitlines() if "place " in line).split()[-2:]
        targets = [port for name in ("n-0", "n-1") for port in listening(place.command(name, ["cat", "/proc/net/tcp"]))]
        assert targets
        arguments = [json.dumps([where[0], int(where[1])]), json.dumps(targets), pickle.dumps(Evil(str(evil))).hex()]
        attack = [sys.executable, "-c", ATTACK, *arguments]
        done = subprocess.run(as_stranger(attack), capture_output=True, text=True, check=True, timeout=200)
        found = json.loads(done.stdout)
        assert found["store"].partition(":")[0] == expected, found
        if encrypt == "off":
            return  # such a run is not protected, which shows that the attack can succeed
        (tmp_path / "stop").touch()
        assert run.wait_ended() == 0, run.stderr
    assert run.stdout.count("right") == 2
    assert not evil.exists()
    refused = [event for event in read_events(run.run_dir / "events.jsonl") if event["kind"] == "rpc_refused"]
    assert {event["peer"].partition(":")[0] for event in refused} == {ADDRESS}
    assert {event["reason"] for event in refused} <= {"certificate", "full"}


def listening(cat: list[str]) -> list[tuple[str, int]]:
    """Return what listens in a node, beside its loopback."""
    rows = [
        line.split() for line in subprocess.run(cat, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    ports = [row[1].split(":") for row in rows if row[3] == "0A"]
    hosts = [(".".join(str(int(host[at : at + 2], 16)) for at in (6, 4, 2, 0)), int(port, 16)) for host, port in ports]
    return [(host, port) for host, port in hosts if not host.startswith("127.")]
