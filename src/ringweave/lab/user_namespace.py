"""Labs of an ordinary user: one user namespace in which the user is root, and in which the same code makes labs.

A user namespace lives as long as a process is in it. The *pause process* is that process: `ringweave lab up` starts it,
the other commands enter its namespaces, and it ends when the last lab is down and no command is inside. Whatever is
left in its namespaces ends with it: the kernel removes namespaces, mounts and links of its own accord.

The pause process listens on a socket with an abstract name, which vanishes with it, so nothing on disk can be out of
date. A connection stands for a command that is inside; the program that the command becomes inherits it.

Source: user_namespaces(7), unix(7) (abstract names, SO_PEERCRED).
"""

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ringweave.errors import LabError, explain
from ringweave.lab import bring_up, duty_cycle, lab_state, tools

_GREETING = b"1"
_PEER_CREDENTIALS = struct.Struct("3i")
_START_TIMEOUT_S = 30.0
_RETRY_S = 0.02
_CHECK_S = 0.25
"""Time between two looks at the labs: a new one may need its duty cycle."""
_IDLE_S = 10.0
"""Time in which the first command has to come."""

_RUN_FOLDER_SCRIPT = """set -e
mount -t tmpfs -o mode=0755,size=64m rw-run /tmp
for entry in /run/* /run/.[!.]*; do
    name=${entry##*/}
    case $name in mount | netns | ringweave*) continue ;; esac
    if [ -L "$entry" ]; then cp -P "$entry" /tmp/
    elif [ -d "$entry" ]; then mkdir "/tmp/$name" && mount --rbind "$entry" "/tmp/$name" || :
    elif [ -e "$entry" ]; then : > "/tmp/$name" && mount --bind "$entry" "/tmp/$name" || :
    fi
done
mkdir /tmp/netns /tmp/ringweave
mount -n --move /tmp /run
cd /
exec "$@"
"""
"""Shell script that gives the new mount namespace a /run in which the user may write. All of the machine's own entries
are in it, but for labs, named network namespaces and the table of mounts. It is made over /tmp, which is always there.
"""


def enter(argv: Sequence[str], *, starts: bool) -> None:
    """Replace this process by a program in the user's namespaces; return at once if this process is root, or inside.

    Args:
        argv: The program, a path, and its arguments. It keeps the current directory, environment and streams.
        starts: Start the pause process if there is none; otherwise return then.

    Raises:
        LabError: The kernel does not let this user have a user namespace, or the pause process does not start.
    """
    if os.geteuid() == 0:
        return
    connection = _connect()
    if connection is None:
        if not starts:
            return
        tools.raise_lab_problems(tools.user_namespace_problems())
        connection = _start_pause_process()
    pid, _ = _peer(connection)
    os.set_inheritable(connection.detach(), True)
    namespaces = [f"--{option}=/proc/{pid}/ns/{kind}" for option, kind in (("user", "user"), ("mount", "mnt"))]
    nsenter = tools.find_program("nsenter") or "nsenter"
    shell = ["/bin/sh", "-c", tools.RUN_IN_FOLDER_SCRIPT, "rw-enter", str(Path.cwd())]
    sys.stdout.flush()
    os.execv(nsenter, [nsenter, "--preserve-credentials", *namespaces, "--", *shell, *argv])


def _address(uid: int) -> str:
    return f"\0ringweave-lab-{uid}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user of the process that listens."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return pid, uid


def _connect() -> socket.socket | None:
    """Return a connection to the user's pause process; None if there is none, or if it is about to end.

    Raises:
        LabError: A process of another user listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(os.getuid()))
        pid, uid = _peer(connection)
        if uid != os.getuid():
            what, expected = "pause process of labs", f"one of user {os.getuid()}"
            do = "Ask that user to end it, or put sudo in front"
            raise LabError(explain(what, got=f"process {pid} of user {uid}", expected=expected, do=do))
        connection.settimeout(_START_TIMEOUT_S)
        if connection.recv(1) == _GREETING:
            connection.settimeout(None)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _start_pause_process() -> socket.socket:
    """Start the pause process, and return a connection to it.

    Raises:
        LabError: It does not start.
    """
    unshare = [tools.find_program("unshare") or "unshare", "--user", "--map-root-user", "--mount"]
    shell = ["--propagation", "slave", "sh", "-c", _RUN_FOLDER_SCRIPT, "rw-pause"]
    command = [*unshare, *shell, sys.executable, "-P", "-m", __name__, str(os.getuid())]
    nothing = subprocess.DEVNULL
    with tools.run_on_first_cpu():
        process = subprocess.Popen(
            command,
            stdin=nothing,
            stdout=nothing,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=tools.tool_environ(),
        )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while (connection := _connect()) is None:
        has_failed = process.poll() not in (None, 0)  # 0: another one was faster
        if has_failed or time.monotonic() > deadline:
            process.kill()
            said = (process.communicate()[1] or b"").decode(errors="replace")
            do = "See what the kernel says (dmesg), or put sudo in front"
            got = " ".join(said.split()) or f"nothing in {_START_TIMEOUT_S:g} s"
            raise LabError(explain("pause process of labs", got=got, expected="one that starts", do=do))
        time.sleep(_RETRY_S)
    return connection


def main(uid: int) -> None:
    """Run the pause process of this user to its end; return at once if there is another one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(_address(uid))
        except OSError:
            return
        listener.listen(64)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.sched_setaffinity(0, range(1024))  # the kernel leaves out those that are not there
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        throttle = duty_cycle.ThrottleProcess()
        try:
            serve(listener, has_labs=_has_labs, on_check=throttle.check)
        finally:
            for name in lab_state.lab_names():  # those whose command was killed
                with contextlib.suppress(LabError):
                    bring_up.remove_lab(name)
            throttle.stop()


def _has_labs() -> bool:
    """Return whether a lab is complete; one whose command was killed is not."""
    return any(bring_up.is_record_up(lab_state.read_record(name)) for name in lab_state.lab_names())


def serve(listener: socket.socket, *, has_labs: Callable[[], bool], on_check: Callable[[], object]) -> None:
    """Count the commands that are inside; return when none is, and there is no lab.

    Args:
        listener: Accepts a connection of each command.
        has_labs: Returns whether a lab is up.
        on_check: Called several times a second.
    """
    until_s, num_inside = time.monotonic() + _IDLE_S, 0
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = selector.select(_CHECK_S)
            for key, _ in ready:
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.send(_GREETING)
                    selector.register(connection, selectors.EVENT_READ)
                    num_inside, until_s = num_inside + 1, 0.0
                elif not _has_more(key.fileobj):
                    selector.unregister(key.fileobj)
                    num_inside -= 1
            on_check()
            if not ready and not num_inside and time.monotonic() > until_s and not has_labs():
                return


def _has_more(connection: object) -> bool:
    """Return whether a connection is still open; close it if not."""
    assert isinstance(connection, socket.socket)
    with contextlib.suppress(OSError):
        if connection.recv(1):
            return True
    connection.close()
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
