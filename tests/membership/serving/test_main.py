"""Two processes of coordinators, in threads of this one, that find each other and are asked by members."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringweave import rpc
from ringweave.errors import RpcError
from ringweave.launcher.node_context import free_port
from ringweave.membership.election import Rejoin
from ringweave.membership.main import CoordinatorProcess, parse
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.membership.messages import Join
from tests.membership.serving.asking import CALL_S, count
from tests.polling import wait_until


@contextmanager
def running(
    authority: rpc.CertificateAuthority, folder: Path, ports: list[int], index: int, *more: str
) -> Iterator[None]:
    """One of the two, as a standby of a job of four."""
    path = folder / f"{index}.json"
    authority.issue("coordinator", str(index)).save(path)
    words = ["--credentials", str(path), "--host", "127.0.0.1", "--port", str(ports[index]), "--elastic", "2:4"]
    words += ["--expected", "4", "--index", str(index), "--standby", "--other", f"127.0.0.1:{ports[1 - index]}"]
    process = CoordinatorProcess(parse([*words, *more]))
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        process.stop()
        thread.join(CALL_S)


def asking(authority: rpc.CertificateAuthority, port: int, name: str) -> rpc.RpcClient:
    """A member that has lost its coordinator in an epoch of four, and asks this one."""
    found: list[rpc.RpcClient] = []

    def is_there() -> bool:
        try:
            trust = rpc.TlsAuthentication(authority.issue("worker", name))
            found.append(rpc.RpcClient.connect("127.0.0.1", port, trust, role="coordinator", timeout_s=CALL_S))
        except RpcError:  # it does not listen yet
            return False
        return True

    wait_until(is_there)
    statuses = tuple(MemberStatus(member=f"{slot}.0", has_state=True, committed=5) for slot in range(4))
    status = next(each for each in statuses if each.member == name)
    rejoining = Rejoin(status=status, membership=Membership(generation_id=(1, 1), statuses=statuses), promised=(1, 1))
    found[0].call(Join(rejoining=rejoining), timeout_s=CALL_S)
    return found[0]


def test_half_of_a_job_goes_on_with_the_one_that_starts_in_a_lost_ones_place(
    authority: rpc.CertificateAuthority, tmp_path: Path
) -> None:
    ports = [free_port(random.SystemRandom()) for _ in range(2)]
    starting = ("--successors", "0.1,1.1")
    with running(authority, tmp_path, ports, 0, *starting), running(authority, tmp_path, ports, 1):
        members = [asking(authority, ports[0], name) for name in ("2.0", "3.0")]
        wait_until(lambda: count(members[0]).is_active)
        assert count(members[0]).term == 3, "odd, and greater than theirs"
        for each in members:
            each.close()
