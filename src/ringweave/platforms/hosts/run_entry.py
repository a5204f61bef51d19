"""Entry of a run: all state that has to survive, kept by every host; and the folder of a run on one host.

```text
STATE/hosts-NAME/ID/host.json        this host's part of the run: its index, its node, its files
STATE/hosts-NAME/ID/credentials.json credentials of the host service
STATE/hosts-NAME/ID/command.json     credentials of commands on this host
STATE/hosts-NAME/ID/ballot.json      last promise of this voter
STATE/hosts-NAME/ID/entry.json       newest known entry of the run
STATE/hosts-NAME/ID/wanted.json      number of workers that `ringweave scale` asked for
STATE/hosts-NAME/ID/service.lock     held while the host service runs
STATE/hosts-NAME/ID/relay.lock       held while the relay runs
STATE/hosts-NAME/ID/service.log      standard error of both
STATE/hosts-NAME/ID/files/           working directory of the workers, if it is a copy
STATE/hosts-NAME/ID/files.json       names, digests and modes of the copied files
STATE/hosts-NAME/ID/job/             job folder of the local platform, for the worker groups of this host
```
"""

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import platformdirs

from ringweave.errors import JobError, LaunchError, UnknownJobError
from ringweave.files import file_io
from ringweave.files.file_io import PathBelow
from ringweave.files.problems import suggest_closest
from ringweave.jobs import records
from ringweave.jobs.records import Job, JobEvent, JobRecord, JsonForm
from ringweave.launcher.scale_requests import WantedWorkers
from ringweave.membership.settings import MemberBounds
from ringweave.param_server.leadership import RoundLeadership
from ringweave.platforms.agent.job_config import RendezvousResult
from ringweave.platforms.hosts.host_list import HostSpec
from ringweave.platforms.hosts.quorum_election import Ballot, EntryVersion
from ringweave.platforms.local.job_folder import JobFolder
from ringweave.platforms.submission import JobOrigin


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEndpoint:
    """Host of a run as the other hosts know it."""

    node: str
    destination: str
    """Its ssh destination; empty for a host that has joined by a token."""
    address: str
    """Address at which other hosts reach it; empty for a host that has not joined yet."""
    port: int
    relay_port: int = 0
    """Port at which its relay takes connections of hosts that cannot be called; 0 without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinSeat:
    """Place in a run for one host that joins by a token of one use."""

    host: int
    proof_digest: str
    """SHA-256 of the token's proof, in hexadecimal digits."""
    sealed: str
    """Credentials of the host, encrypted by a key that only the token gives."""
    expires_s: float
    """Time after which the token counts no more, seconds since 1970."""
    used_by: str = ""
    """Number that the joiner has drawn; empty until the token is used."""


class StaleEntryError(LaunchError):
    """The entry has been changed by another thread since this change was computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """Event of a run, kept once."""

    key: str
    """Key of the job's event, unique within the run."""
    time_s: float
    """Seconds since 1970."""
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRecord:
    """Newest request of `ringweave scale`, and what it has changed."""

    wanted: WantedWorkers
    before: int
    """Number of workers that the run was to have before."""
    most: int
    """Largest number of workers that it was ever to have."""
    request_id: str = ""
    """Id of the request, by which it is known if it is sent again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEntry:
    """Everything that a new leader needs to go on."""

    run_id: str
    """Id of the run, never reused."""
    version: EntryVersion
    hosts: tuple[HostEndpoint, ...]
    """Hosts in the order of the used nodes of the request."""
    voters: tuple[int, ...]
    """Hosts that count for a quorum."""
    job: Job
    origin: JobOrigin
    rendezvous: RendezvousResult | None = None
    """Result of the last rendezvous; hosts that come later in the same round get it too."""
    events: tuple[RunEvent, ...] = ()
    """Latest events, oldest first."""
    leadership: RoundLeadership | None = None
    """Latest record of which parameter server leads; None without a standby."""
    seats: tuple[JoinSeat, ...] = ()
    """Places of hosts that join by a token, taken or not."""
    bounds: MemberBounds | None = None
    """Bounds of `--elastic`; None for a run that is not elastic."""
    scaled: ScaleRecord | None = None
    """Newest request of `ringweave scale`; None: as many workers as the run began with."""

    @property
    def num_wanted(self) -> int:
        """Number of workers that the run shall have."""
        return self.scaled.wanted.workers if self.scaled is not None else self.job.request.num_workers

    @property
    def most_wanted(self) -> int:
        """Largest number of workers that the run was ever to have."""
        return self.scaled.most if self.scaled is not None else self.job.request.num_workers

    def wanted_ranks(self, node: int) -> list[int]:
        """Return the global ranks of the workers that a node, given by its index in the request, shall have."""
        return [rank for rank in self.origin.config(self.job).slots_of_node(node) if rank < self.num_wanted]

    @property
    def name(self) -> str:
        return self.job.request.name

    @property
    def unjoined(self) -> tuple[str, ...]:
        """Names of the hosts that have not joined yet."""
        return tuple(host.node for host in self.hosts if not host.address)

    def host_of_node(self, node: int) -> int:
        """Return the index of the host of a node, which the request names by its index."""
        return self.job.used_nodes.index(node)

    def with_record(self, record: JobRecord, events: tuple[JobEvent, ...], now: float) -> "RunEntry":
        """Return the entry with another record and its new events; an event that is known already stays as it is."""
        known = {each.key for each in self.events}
        added = [
            RunEvent(key=event.key, time_s=now, kind=event.kind, text=event.text)
            for event in events
            if event.key not in known
        ]
        return replace(self, job=replace(self.job, record=record), events=(*self.events, *added)[-records.MAX_EVENTS :])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostConfig:
    """Part of a run that differs from host to host; written once when the run starts there."""

    run_id: str
    index: int
    """Index of this host among the hosts of the run."""
    node: str
    address: str
    """Address that the host service listens on, and the workers' address for other hosts."""
    port: int
    directory: str
    """Working directory of the workers."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command hands on to the workers."""
    first_leader: int | None = None
    """Leader of the first term; None for a host that joins a run."""
    join_port: int = 0
    """Port at which joining hosts call; 0 without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFolder:
    """Paths of a run on this host."""

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    host_config = PathBelow("host.json")
    credentials = PathBelow("credentials.json")
    """Credentials of the host service."""
    command_credentials = PathBelow("command.json")
    """Credentials of commands on this host."""
    ballot = PathBelow("ballot.json")
    entry = PathBelow("entry.json")
    service_lock = PathBelow("service.lock")
    """File that the host service locks."""
    relay_lock = PathBelow("relay.lock")
    """File that the relay locks."""
    wanted = PathBelow("wanted.json")
    """Newest request for another number of workers, for this host's node agents."""
    service_log = PathBelow("service.log")
    files = PathBelow("files")
    """Copy of the script's directory."""
    file_list = PathBelow("files.json")
    """Names, digests and modes of the copied files."""

    @property
    def job(self) -> JobFolder:
        """Job folder of this host's worker groups."""
        return JobFolder(root=self.root / "job")

    def load_config(self) -> HostConfig:
        return HOST_CONFIG_JSON.parse(file_io.read_bounded(self.host_config))

    def save_config(self, config: HostConfig) -> None:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file_io.replace_text(self.host_config, HOST_CONFIG_JSON.dump(config))

    def find_name(self) -> str:
        """Return the name of the run; empty if its entry cannot be read."""
        try:
            return self.load_entry().name
        except (JobError, OSError, ValueError):
            return ""

    def load_entry(self) -> RunEntry:
        return ENTRY_JSON.parse(file_io.read_bounded(self.entry))

    def save_entry(self, entry: RunEntry) -> None:
        file_io.replace_text(self.entry, ENTRY_JSON.dump(entry), is_durable=True)

    def load_ballot(self) -> Ballot:
        return _BALLOT_JSON.parse(file_io.read_bounded(self.ballot))

    def save_ballot(self, ballot: Ballot) -> None:
        file_io.replace_text(self.ballot, _BALLOT_JSON.dump(ballot), is_durable=True)


class HostsReader:
    """Reads the hosts of the entry again once its file is another one."""

    def __init__(self, folder: HostFolder) -> None:
        self._folder = folder
        self._read_mtime_ns = 0
        self._hosts: Sequence[HostEndpoint] = ()

    def read(self) -> Sequence[HostEndpoint]:
        with contextlib.suppress(FileNotFoundError):  # the run is being removed
            mtime_ns = self._folder.entry.stat().st_mtime_ns
            if mtime_ns != self._read_mtime_ns:
                self._hosts, self._read_mtime_ns = self._folder.load_entry().hosts, mtime_ns
        return self._hosts


def hosts_state_folder() -> Path:
    """Return the folder with the runs of this user on this host; its name has the host's, for shared home folders."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return platformdirs.user_state_path("ringweave") / f"hosts-{name}"


def find_run_folders(state: Path) -> list[HostFolder]:
    """Return the folders of runs that have this host as one of theirs."""
    try:
        entries = sorted(state.iterdir())
    except FileNotFoundError:
        return []
    folders = [HostFolder(root=each) for each in entries]
    return [folder for folder in folders if folder.host_config.exists() and folder.entry.exists()]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsOptions:
    """Options of a connection to hosts."""

    python: str | None = None
    """Interpreter on the hosts; None: the same path as here, else that of the `ringweave` on their PATH."""
    installed: str = ""
    """Path of the interpreter that `--install` made, below the home folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRun:
    """Run that this user has started from this machine, as its file says."""

    run_id: str
    name: str
    hosts: tuple[HostSpec, ...]
    """Hosts that ssh reaches."""
    options: HostsOptions
    run_dir: str
    """Folder on this machine that gets the output; empty for a job that was submitted."""
    join_lines: Mapping[str, str] = field(default_factory=dict)
    """Name of a joining host -> the line to type there."""
    joining: tuple[tuple[int, str], ...] = ()
    """Index in the run and name of each joining host; `hosts` has the others."""

    def is_named(self, name: str) -> bool:
        """Return whether a user means this run: by its name, its id or the folder of its output."""
        return name in (self.name, self.run_id) or (bool(self.run_dir) and str(Path(name).absolute()) == self.run_dir)


def known_runs_folder() -> Path:
    """Return the folder of the runs that this user has started from this machine."""
    return platformdirs.user_state_path("ringweave") / "started"


def save_known_run(known: KnownRun) -> None:
    """Remember a run, for the commands that follow."""
    folder = known_runs_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = _KNOWN_RUN_JSON.dump(known)
    file_io.replace_text(folder / f"{known.name}.json", text, mode=0o600)  # it may contain tokens


def forget_known_run(known: KnownRun) -> None:
    """Forget a run that has been removed from its hosts."""
    (known_runs_folder() / f"{known.name}.json").unlink(missing_ok=True)


def list_known_runs() -> list[KnownRun]:
    """Return the runs that this user has started from this machine, oldest first.

    A file that cannot be read hides no other; `unreadable_runs` names it.
    """
    found = [(path, _read_known_run(path)) for path in known_runs_folder().glob("*.json")]
    return [known for _, known in sorted(found, key=lambda row: _changed_s(row[0])) if known is not None]


def _read_known_run(path: Path) -> KnownRun | None:
    try:
        return _KNOWN_RUN_JSON.parse(file_io.read_bounded(path))
    except (OSError, ValueError):
        return None


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def unreadable_runs() -> list[tuple[str, Path, float]]:
    """Return name, file and time of each run that was started here, or has this host, and whose file cannot be read."""
    paths = [(path.stem, path) for path in known_runs_folder().glob("*.json") if _read_known_run(path) is None]
    folders = find_run_folders(hosts_state_folder())
    paths += [(folder.run_id, folder.entry) for folder in folders if not folder.find_name()]
    return [(name, path, _changed_s(path)) for name, path in paths if path.exists()]


UNREADABLE_HINT = "Use the ringweave that wrote it, or remove the file"


def refuse_unreadable(name: str) -> None:
    """Refuse the name of a run whose file cannot be read.

    Raises:
        JobError: It is one; the text names the file.
    """
    path = next((path for each, path, _ in unreadable_runs() if each == name), None)
    if path is not None:
        expected = "one whose file can be read"
        raise JobError("run", got=name, expected=expected, do=UNREADABLE_HINT, where=str(path))


def is_run_on_hosts(name: str) -> bool:
    """Return whether this is a run on hosts that was started here, or has this host."""
    if (known_runs_folder() / f"{Path(name).name}.json").exists():
        return True
    here = find_run_folders(hosts_state_folder())
    return any(name in (folder.run_id, folder.find_name()) for folder in here) or any(
        known.is_named(name) for known in list_known_runs()
    )


def find_known_run(name: str) -> KnownRun:
    """Return a run by its name, or by the folder of its output.

    Raises:
        UnknownJobError: There is none.
    """
    runs = list_known_runs()
    found = next((run for run in runs if run.is_named(name)), None)
    if found is None:
        refuse_unreadable(name)
        names = [run.name for run in runs]
        do = suggest_closest(name, names) or "See ringweave jobs --on hosts"
        expected = f"one of {', '.join(names)}" if names else "a run that was started from this machine"
        raise UnknownJobError("run", got=name, expected=expected, do=do)
    return found


ENTRY_JSON = JsonForm(RunEntry, saved_as="entry of the run")
HOST_CONFIG_JSON, _BALLOT_JSON, WANTED_JSON = JsonForm(HostConfig), JsonForm(Ballot), JsonForm(WantedWorkers)
_KNOWN_RUN_JSON = JsonForm(KnownRun, indent=2)
