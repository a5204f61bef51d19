"""One node of an SSH lab: its namespaces, files, processes and sshd."""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ringweave.errors import LabError
from ringweave.lab import Lab, lab_state
from ringweave_bench.chaos import clock_shift

USER = "trainer"
FIRST_UID = 10000
START_TIMEOUT_S = 30.0
SSHD = "/usr/sbin/sshd"
SSH_PORT = 22
WRITABLE_FOLDERS = ("/home", "/tmp", "/var/tmp", "/dev/shm")
"""File systems of a node's own in which its user may write."""
_PROGRAMS = Path(__file__).parent / "programs"
_PROXY_PORT = 2222
"""Port of the proxy that delays connections, and mark of its own packets."""
_CLONE_NEWPID = 0x20000000
_TCP_LISTEN = "0A"
_USER_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/games"
_ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CLOCK_LIBRARY = "/run/ringweave-clock.so"
_SSHD_CONFIG = """Port 22
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
X11Forwarding yes
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
"""
"""Settings of Debian's sshd_config, but for PAM and passwords."""
_SETUP_SCRIPT = """set -e
umask 022
mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t tmpfs -o mode=0755,size=16m lab-run /run
mkdir -p /run/sshd /run/lock /run/ringweave /run/kept /run/etc/ssh
echo "$1" > /run/ringweave/inside
cp -p /etc/ssh/ssh_config /etc/ssh/moduli /run/etc/ssh/
for name in passwd group hosts; do cp -p /etc/$name /run/etc/$name; mount --bind /run/etc/$name /etc/$name; done
for name in hostname resolv.conf; do
    if [ -f /etc/$name ]; then echo "$1" > /run/etc/$name; mount --bind /run/etc/$name /etc/$name; fi
done
: > /run/etc/resolv.conf
mount --bind /run/etc/ssh /etc/ssh
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 lab-pts /dev/pts
if [ ! -L /dev/ptmx ]; then mount --bind /dev/pts/ptmx /dev/ptmx; fi
"""
"""Shell script: /proc of the node's processes, /run, /dev/pts and files in /etc of its own. Names are looked up in
/etc/hosts alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDisks:
    """Sizes of a node's own file systems in bytes."""

    home_bytes: int
    tmp_bytes: int
    """Of each of /tmp, /var/tmp and /dev/shm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    """An Ed25519 key in OpenSSH's formats."""

    private_text: str
    public_text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LabProcess:
    """A process of a node."""

    pid: int
    """Its id on the machine, not the one that the node sees."""
    command: str
    """Its arguments, joined by spaces; sshd writes the state of a session there."""


def make_key(comment: str) -> KeyPair:
    """Make a key."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private_text=private.decode(), public_text=f"{public.decode()} {comment}\n")


class SshNode:
    """One node: commands, files and processes in it, its sshd, and faults of it alone."""

    def __init__(self, lab: Lab, index: int) -> None:
        node = lab.cluster.nodes[index]
        self.name, self.index, self.address = node.name, index, lab.addresses[node.name][0]
        self.user_id = FIRST_UID + index
        self.host_key, self.user_key = make_key(f"root@{node.name}"), make_key(f"{USER}@{node.name}")
        self._lab = lab
        self._device = 0 if lab.quotas is not None else None
        self._init: subprocess.Popen[bytes] | None = None
        self._sshd: subprocess.Popen[str] | None = None
        self._children: list[subprocess.Popen[str]] = []
        self._proxy: subprocess.Popen[str] | None = None
        self._clock_environ: Mapping[str, str] = {}
        self._first_files: frozenset[str] = frozenset()

    @property
    def home(self) -> str:
        """Home of the user."""
        return f"/home/{USER}"

    @property
    def root(self) -> Path:
        """Root of the node's file systems as the machine sees it; absolute symbolic links lead out of it."""
        return Path(f"/proc/{self.init_pid}/root")

    @property
    def init_pid(self) -> int:
        """Id of the node's first process on the machine."""
        assert self._init is not None, "the node has been started"
        return self._init.pid

    def begin_start(self, disks: NodeDisks) -> None:
        """Start the node's first process, which mounts its file systems. It dies with the thread that calls this."""
        init = [os.path.realpath(sys.executable), "-I", "-S", str(_PROGRAMS / "node_init.py")]
        script = _SETUP_SCRIPT + _disk_script(disks) + f"exec {shlex.join(init)}\n"
        unshare = ["unshare", "--mount", "--ipc", "--propagation", "private"]
        argv = [*unshare, "/bin/sh", "-c", script, "lab-init", self.name]
        command = ["setpriv", "--pdeathsig", "KILL", "--", *self._lab.command(self.name, argv, self._device)]
        with _children_in_new_pid_namespace():
            self._init = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd="/")

    def finish_start(self, known_hosts: str, authorized_keys: str) -> None:
        """Wait for the first process, write the files of the user and of sshd, and start sshd without waiting for it.

        Args:
            known_hosts: Host keys that the user trusts.
            authorized_keys: Keys that may log in as the user.

        Raises:
            LabError: The file systems could not be mounted; the reason is on standard error.
        """
        assert self._init is not None
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"ready\n":
            raise LabError(f"node {self.name}: not started, expected its first process. See the output above.")
        account = f"{USER}:*:{self.user_id}:{self.user_id}::{self.home}:/bin/bash\n"
        for name, line in (("passwd", account), ("group", f"{USER}:x:{self.user_id}:\n")):
            with (self.root / "etc" / name).open("a", encoding="utf-8") as file:
                file.write(line)
        self._make_home(known_hosts, authorized_keys)
        self._write_sshd_files()
        self._first_files = frozenset(self._all_files())
        self.begin_sshd()

    def popen(
        self, argv: Sequence[str], *, user: str = USER, environ: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command in the node, as a shell that has just logged in would: in the home, in a new environment.

        The process is the command itself: its id (on the machine), exit status and signals are the command's. It dies
        with the calling thread.

        Args:
            argv: The command; found by the user's PATH. If it is not there, the exit code is 127.
            user: The node's user, or root.
            environ: Environment variables beside HOME, USER, LOGNAME, SHELL and PATH.
            options: As of subprocess.Popen; pipes are text.
        """
        become, home, path = [], "/root", _ROOT_PATH
        if user != "root":
            home, path = self.home, _USER_PATH
            become = [f"--reuid={self.user_id}", f"--regid={self.user_id}", "--init-groups"]
        own = {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "PATH": path}
        variables = [f"{name}={value}" for name, value in {**own, **self._clock_environ, **(environ or {})}.items()]
        enter = ["nsenter", f"--target={self.init_pid}", "--mount", "--ipc", "--"]
        script = 'cd "$1" && shift && exec "$@"'
        inner = ["setpriv", *become, "--pdeathsig=KILL", "--", "env", "-i", *variables]
        inner += ["/bin/sh", "-c", script, "lab-shell", home, *argv]
        with _children_in_pid_namespace_of(self.init_pid):
            command = self._lab.command(self.name, [*enter, *inner], self._device)
            process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **options)
        self._children = [each for each in self._children if each.poll() is None] + [process]
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = USER,
        check: bool = True,
        timeout_s: float = 300.0,
        stdin_text: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the node to its end, as `popen` starts it; its output is text.

        Raises:
            subprocess.CalledProcessError: It failed, and `check` is true. The error's note has what it printed.
            subprocess.TimeoutExpired: It took longer; it is killed, its children are not.
        """
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(argv, user=user, environ=environ, **pipes) as process:
            try:
                output, errors = process.communicate(stdin_text, timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, output, errors)
        try:
            if check:
                done.check_returncode()
        except subprocess.CalledProcessError as error:
            error.add_note(f"node {self.name}: {output}{errors}")
            raise
        return done

    def path(self, path: str) -> Path:
        """Return the path on the machine of a file of the node; a relative one begins in the user's home."""
        return self.root / str(Path(self.home, path)).lstrip("/")

    def read(self, path: str) -> str:
        """Read a file of the node; a relative path begins in the user's home."""
        return self.path(path).read_text(encoding="utf-8")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the user's, and the folders above it; a relative path begins in the home."""
        target = self.path(path)
        for folder in reversed(target.parents):
            if not folder.exists():
                folder.mkdir()
                os.chown(folder, self.user_id, self.user_id)
        target.write_text(text, encoding="utf-8")
        os.chown(target, self.user_id, self.user_id)
        target.chmod(mode)

    def files(self) -> list[str]:
        """Return the files and folders in the node's own file systems that were not there when it had started."""
        return sorted(set(self._all_files()) - self._first_files)

    def processes(self) -> list[LabProcess]:
        """Return the processes of the node, but for those of the lab: the first one, the listening sshd, a proxy."""
        own = {self.init_pid, *(each.pid for each in (self._sshd, self._proxy) if each)}
        return [
            LabProcess(pid=pid, command=lab_state.command_line(pid))
            for pid in lab_state.pids_inside(self._namespaces())
            if pid not in own
        ]

    def listening_ports(self) -> list[int]:
        """Return the TCP ports on which any process of the node listens, sorted; not that of a proxy of the lab."""
        rows = [
            line.split()
            for name in ("tcp", "tcp6")
            if (table := Path(f"/proc/{self.init_pid}/net/{name}")).exists()
            for line in table.read_text(encoding="ascii").splitlines()[1:]
        ]
        ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _TCP_LISTEN}
        return sorted(ports - ({_PROXY_PORT} if self._proxy else set()))

    def kill_all(self, *, sshd: bool = False) -> None:
        """Kill every process of the node by SIGKILL, except for those of the lab, see `processes`.

        Sessions of sshd die too: their clients see the connection close.

        Args:
            sshd: Kill the listening sshd as well.
        """
        if sshd and self._sshd is not None:
            self._sshd.kill()
            self._sshd.wait()
        self._kill(lambda process: True)

    def kill_ssh_sessions(self) -> None:
        """Kill the sshd processes of open sessions. The commands in them go on, with their pipes closed."""
        self._kill(lambda process: process.command.startswith("sshd:"))

    def begin_sshd(self) -> None:
        """Start sshd without waiting until it listens."""
        log = (self.root / "run/sshd.log").open("ab")
        with log:
            command = [SSHD, "-D", "-e"]
            self._sshd = self.popen(command, user="root", stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_sshd(self) -> None:
        """Wait until sshd listens.

        Raises:
            LabError: It has exited, or does not listen in time.
        """
        assert self._sshd is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while SSH_PORT not in self.listening_ports():
            if self._sshd.poll() is not None or time.monotonic() > deadline:
                raise LabError(
                    f"sshd of node {self.name}",
                    got="".join(self.sshd_log().splitlines()[-1:]),
                    expected=f"it listens on port {SSH_PORT}",
                    do="See its log",
                )
            time.sleep(0.005)

    def sshd_log(self) -> str:
        """Return the log of sshd since the node's start."""
        return self.path("/run/sshd.log").read_text(encoding="utf-8")

    def start_sshd(self) -> None:
        """Start sshd and wait until it listens."""
        self.begin_sshd()
        self.wait_sshd()

    def stop_sshd(self) -> None:
        """Stop the listening sshd; open sessions go on. A new connection is refused."""
        if self._sshd is not None:
            self._sshd.terminate()
            self._sshd.wait()

    def change_host_key(self) -> None:
        """Give the node another host key, as when it was installed anew; other nodes know the previous one."""
        self.host_key = make_key(f"root@{self.name}")
        self._write_sshd_files()
        self.stop_sshd()
        self.start_sshd()

    def remove_key(self) -> None:
        """Remove the user's private key: ssh from this node is refused everywhere."""
        self.path(".ssh/id_ed25519").unlink()

    def refuse_keys(self) -> None:
        """Empty the list of authorized keys: ssh to this node is refused for everyone."""
        self.write(".ssh/authorized_keys", "", 0o600)

    def fill_disk(self, folder: str = "/home") -> None:
        """Fill the file system of /home, /tmp, /var/tmp or /dev/shm to the last byte, in a file of root's."""
        with self.path(f"{folder}/.full").open("wb") as file:
            free = os.statvfs(file.fileno())
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)

    def empty_disk(self, folder: str = "/home") -> None:
        """Free the bytes that `fill_disk` has taken."""
        self.path(f"{folder}/.full").unlink()

    def set_clock(self, days: float) -> None:
        """Set the wall clock of processes that start from now on ahead by so many days; sshd starts anew.

        The first call compiles a library, see `clock_shift`; later calls move the processes of earlier ones as well.

        Raises:
            LabError: This machine has no C compiler.
        """
        self._first_files |= {clock_shift.CLOCK_FILE}
        self.write(clock_shift.CLOCK_FILE, "")
        self.path(clock_shift.CLOCK_FILE).write_bytes(clock_shift.shift_to_bytes(days * 86400))
        if not self._clock_environ:
            clock_shift.compile_library(self.path("/run")).rename(self.path(_CLOCK_LIBRARY))
            self._clock_environ = {"LD_PRELOAD": _CLOCK_LIBRARY, "RINGWEAVE_CLOCK": clock_shift.CLOCK_FILE}
            self._write_sshd_files()
            self.stop_sshd()
            self.start_sshd()

    def hide_python(self) -> None:
        """Hide every Python of the node from processes that start from now on, as on a machine without one."""
        lines = ["set -e", "mkdir -p /run/hidden"]
        for folder in _python_folders():
            lines.append(f"mount -t tmpfs -o ro,size=4k lab-hidden {shlex.quote(folder)}")
        for folder in ("/usr/bin", "/usr/local/bin"):
            own = f"/run/hidden{folder}"
            layers = f"lowerdir={folder},upperdir={own}/upper,workdir={own}/work"
            lines += [
                f"mkdir -p {own}/upper {own}/work",
                f"mount -t overlay -o {layers} lab-hidden {folder}",
                f"rm -f {folder}/python*",
            ]
        self.run(["/bin/sh", "-c", "\n".join(lines)], user="root")

    def make_venv(self, folder: str, wheel: Path | None = None) -> str:
        """Make a virtual environment of the user's, with nothing or with one wheel in it.

        The wheel finds its dependencies in this machine's site-packages, but what is installed there as editable is
        absent.

        Args:
            folder: Folder to make; a relative one begins in the home.
            wheel: The wheel on the machine.

        Returns:
            Path of its Python.
        """
        place = str(Path(self.home, folder))
        python, version = f"{place}/bin/python", f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.run([os.path.realpath(sys.executable), "-m", "venv", "--without-pip", place])
        if wheel is not None:
            copy = f"/tmp/{wheel.name}"
            self.write(copy, "")
            self.path(copy).write_bytes(wheel.read_bytes())
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
            self.run([*pip, "install", "--quiet", "--no-cache-dir", "--no-index", "--no-deps", copy])
            self.path(copy).unlink()
            folders = "".join(f"{each}\n" for each in sys.path if each.endswith("-packages"))
            self.write(f"{place}/lib/{version}/site-packages/lab.pth", folders)
        return python

    def delay_ms(self, round_trip_ms: float, ports: Sequence[int] = ()) -> None:
        """Delay TCP between this node and all others by a round trip, in both directions of connections.

        A proxy in the node takes the connections over (programs/delayed_link.py), so the peer of an incoming one has
        the node's own address, and a connection is open before its first bytes may pass. The delay of connections
        that are open already does not change.

        Args:
            round_trip_ms: Half of it is added to either direction; 0 ends the delay.
            ports: Destination ports whose connections are delayed; all if empty.
        """
        if self._proxy is not None:
            self.nft("delete table ip lab_delay")
            self._proxy.terminate()
            self._proxy.wait()
            self._proxy = None
        if round_trip_ms == 0:
            return
        python = os.path.realpath(sys.executable)
        argv = [python, "-I", "-S", str(_PROGRAMS / "delayed_link.py"), str(_PROXY_PORT), str(round_trip_ms)]
        self._proxy = self.popen(argv, user="root", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        output = self._proxy.stdout
        assert output is not None
        with output:
            output.readline()
        chosen = f"tcp dport {{ {', '.join(map(str, ports))} }}" if ports else "meta l4proto tcp"
        self.nft(
            "table ip lab_delay {",
            "chain prerouting { type nat hook prerouting priority dstnat;",
            f'iifname != "lo" {chosen} redirect to :{_PROXY_PORT}; }}',
            "chain output { type nat hook output priority -100;",
            f'oifname != "lo" meta mark != {_PROXY_PORT} {chosen} redirect to :{_PROXY_PORT}; }}',
            "}",
        )

    def nft(self, *lines: str) -> None:
        """Apply nftables commands in the node, all or none."""
        self.run(["nft", "-f", "-"], user="root", stdin_text="\n".join(lines) + "\n")

    def kill_init(self) -> None:
        """Kill the node's first process, and so all of it, for good."""
        if self._init is None:
            return
        self._init.kill()
        for process in self._children:  # the kernel waits for them before it lets go of the first one
            process.wait()
        self._init.wait()
        assert self._init.stdout is not None
        self._init.stdout.close()

    def _kill(self, is_meant: Callable[[LabProcess], bool]) -> None:
        """Kill processes until none is left: they may fork meanwhile."""
        inside = self._namespaces()
        while found := [each.pid for each in self.processes() if is_meant(each)]:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    handle = os.pidfd_open(pid)
                    try:
                        if pid in lab_state.pids_inside(inside):  # still the same, now that the handle holds it
                            signal.pidfd_send_signal(handle, signal.SIGKILL)
                    finally:
                        os.close(handle)

    def _namespaces(self) -> set[lab_state.NamespaceId]:
        return lab_state.identify_namespaces([lab_state.NETNS_FOLDER / self._lab.layout.namespaces[self.name]])

    def _make_home(self, known_hosts: str, authorized_keys: str) -> None:
        shutil.copytree("/etc/skel", self.path(self.home), symlinks=True)
        for path in (self.path(self.home), *self.path(self.home).rglob("*")):
            os.chown(path, self.user_id, self.user_id)
        self.path(self.home).chmod(0o700)
        self.write(".ssh/id_ed25519", self.user_key.private_text, 0o600)
        self.write(".ssh/id_ed25519.pub", self.user_key.public_text)
        self.write(".ssh/known_hosts", known_hosts, 0o600)
        self.write(".ssh/authorized_keys", authorized_keys, 0o600)
        self.write(".ssh/config", f"Host *\n    User {USER}\n    IdentityFile ~/.ssh/id_ed25519\n", 0o600)
        self.path(".ssh").chmod(0o700)

    def _write_sshd_files(self) -> None:
        folder = self.path("/etc/ssh")
        variables = " ".join(f"{name}={value}" for name, value in self._clock_environ.items())
        config = _SSHD_CONFIG + (f"SetEnv {variables}\n" if variables else "")
        (folder / "sshd_config").write_text(config, encoding="utf-8")
        (folder / "ssh_host_ed25519_key.pub").write_text(self.host_key.public_text, encoding="utf-8")
        (folder / "ssh_host_ed25519_key").touch(0o600)
        (folder / "ssh_host_ed25519_key").write_text(self.host_key.private_text, encoding="utf-8")

    def _all_files(self) -> Iterator[str]:
        """Yield the paths of the node's own file systems in which its user may write, without folders mounted there."""
        for start in WRITABLE_FOLDERS:
            device = self.path(start).stat().st_dev
            for folder, folders, files in os.walk(self.path(start)):
                is_own = {each: (Path(folder) / each).lstat().st_dev == device for each in folders}
                folders[:] = [each for each in folders if is_own[each]]
                yield from (f"/{Path(folder, each).relative_to(self.root)}" for each in (*folders, *files))


def _disk_script(disks: NodeDisks) -> str:
    """Return the shell script that mounts the writable file systems, with the folders of Python still visible."""
    kept = _visible_folders()
    sizes = {folder: disks.home_bytes if folder == "/home" else disks.tmp_bytes for folder in WRITABLE_FOLDERS}
    covers = {**sizes, **dict.fromkeys(_closed_folders(kept), 2**16)}
    staged = [folder for folder in kept if any(Path(folder).is_relative_to(cover) for cover in covers)]
    lines = []
    for number, folder in enumerate(staged):
        lines += [f"mkdir /run/kept/{number}", f"mount --rbind {shlex.quote(folder)} /run/kept/{number}"]
    for cover, size in covers.items():
        mode = "0755" if cover == "/home" or cover not in sizes else "1777"
        lines.append(f"mount -t tmpfs -o mode={mode},size={size},nosuid,nodev lab-disk {shlex.quote(cover)}")
    for number, folder in enumerate(staged):
        target = shlex.quote(folder)
        lines += [
            f"mkdir -p {target}",
            f"mount --move /run/kept/{number} {target}",
            f"mount -o remount,bind,ro {target}",
        ]
    return "\n".join([*lines, "mount -o remount,bind,ro /"]) + "\n"


def _visible_folders() -> list[str]:
    """Return the folders that this Python needs, none within another.

    A folder that is itself for root alone, or would uncover a file system of the node's own, is left out: a script's
    folder may be /root or /tmp.
    """
    needed = {Path(each).resolve() for each in (sys.prefix, sys.base_prefix, _PROGRAMS, *sys.path)}
    covers = {above for cover in map(Path, WRITABLE_FOLDERS) for above in (cover, *cover.parents)}
    every = {each for each in needed - covers if each.is_dir() and each.stat().st_mode & stat.S_IXOTH}
    return sorted(str(each) for each in every if every.isdisjoint(each.parents))


def _closed_folders(folders: Sequence[str]) -> set[str]:
    """Return the uppermost folders above these that only root may pass."""
    found = set()
    for folder in folders:
        above = [*reversed(Path(folder).parents)]
        closed = [str(each) for each in above if not each.stat().st_mode & stat.S_IXOTH]
        found |= set(closed[:1])
    return found


def _python_folders() -> list[str]:
    places = {os.path.realpath(each) for each in (sys.prefix, sys.base_prefix)}
    return sorted(each for each in places if each not in ("/usr", "/usr/local"))


@contextmanager
def _children_in_new_pid_namespace() -> Iterator[None]:
    """Put the next child of this thread in a new process id namespace, as its first process."""
    with _restored_pid_namespace() as libc:
        _check(libc.unshare(_CLONE_NEWPID))
        yield


@contextmanager
def _children_in_pid_namespace_of(pid: int) -> Iterator[None]:
    """Put children of this thread in the process id namespace of a process. They keep this process as their parent."""
    with _restored_pid_namespace() as libc:
        place = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(libc.setns(place, _CLONE_NEWPID))
            yield
        finally:
            os.close(place)


@contextmanager
def _restored_pid_namespace() -> Iterator[ctypes.CDLL]:
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield libc
    finally:
        _check(libc.setns(own, _CLONE_NEWPID))
        os.close(own)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise LabError(f"process id namespace: {os.strerror(number)}, expected a kernel that has them. Run as root.")
