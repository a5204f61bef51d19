"""What `prepare` does in an elastic job: `ringweave run --elastic`."""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import wire
from ringweave.comm import joining, regrouping
from ringweave.comm.regrouping import EpochGroups
from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError, explain
from ringweave.membership.agent import Agent
from ringweave.planning import modes
from ringweave.telemetry import EventLog
from ringweave.training import garbage, timing, wrapping
from ringweave.training.elastic import exits, seams
from ringweave.training.elastic.crew import Facts, JobCrew, Means
from ringweave.training.elastic.loader import ElasticLoader, ElasticParts
from ringweave.training.elastic.recording import ElasticRecorder
from ringweave.training.elastic.rosters import Rosters
from ringweave.training.elastic.session import Session
from ringweave.training.elastic.state import JobState
from ringweave.training.loading import orders
from ringweave.training.reducing import SampleWeights
from ringweave.training.timing import StepTimer
from ringweave.wire.states import Shelf

_LOGGER = logging.getLogger("ringweave")
_HASTE_S = 0.5
"""How long the end of a process that was put out waits for each of its threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the script said."""

    mode: str
    reduction: str
    max_samples: int | None
    ddp: dict[str, Any]
    carried: Mapping[str, Any]


def prepare(
    given: tuple[nn.Module, Optimizer, DataLoader],
    asked: Wanted,
    environment: WorkerEnvironment,
    timer: StepTimer,
) -> tuple[DistributedDataParallel, Optimizer, ElasticLoader]:
    """Become a member of the job, with its state; returns when the first epoch with this member has begun.

    Raises:
        TrainingError: The script has a process group of its own, or data that cannot be shared in this way.
        DisagreementError: The others have prepared something else.
        MembershipError: The job is over, or does not want this worker.
    """
    model, optimizer, loader = given
    check_group()
    mode, reason = modes.decide(asked.mode, environment.mode, 2)
    reading, seed = orders.read(loader), orders.seed_of(loader)
    alike = {**asdict(reading), "mode": mode, "reduction": asked.reduction, "seed": seed}
    alike["num_parameters"] = num_parameters_of(model)
    member = _enlist((model, optimizer), asked, environment, timer, alike)
    shares = member.crew.rosters.latest.shares
    member.recorder.prepared(mode=mode, asked=asked.mode, reason=reason, shares=shares)
    weights = SampleWeights(num_ranks=1, is_mean=asked.reduction == "mean")
    parallel = wrapping.wrap(model, asked.ddp, member.session, weights, timer)
    timing.watch(timer, parallel, optimizer)
    parts = ElasticParts(
        member=member.name,
        session=member.session,
        rosters=member.crew.rosters,
        books=member.crew.books,
        place=member.crew.place,
        weights=weights,
        timer=timer,
        end_step=member.crew.end_step,
        note=member.recorder.accounted,
    )
    return parallel, optimizer, ElasticLoader(loader, reading, seed, parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Enlisted:
    """This process as a member of its job."""

    name: str
    session: Session
    crew: JobCrew
    recorder: ElasticRecorder


def _enlist(
    trained: tuple[nn.Module, Optimizer],
    asked: Wanted,
    environment: WorkerEnvironment,
    timer: StepTimer,
    alike: dict[str, Any],
) -> _Enlisted:
    """Become a member; returns once an epoch with this member has begun, and it has the job's state."""
    name, (model, optimizer) = name_of(environment), trained
    trust, address, shelf = trust_of(environment), regrouping.own_address(), Shelf()
    groups = EpochGroups(address)
    server = serve_state(environment, trust, shelf, address)
    facts = Facts(
        member=name,
        state_place=f"{address} {server.port}",
        cap=asked.max_samples,
        assumed_speed=joining.assumed(environment, os.environ).speed,
        alike=alike,
    )
    recorder = ElasticRecorder(environment, lambda: session.is_teller)
    rosters = Rosters(alike["batch_samples"], is_balanced=alike["mode"] == modes.BALANCED)
    means = Means(shelf=shelf, trust=trust)
    crew = JobCrew(facts, rosters, timer, JobState(model, optimizer, asked.carried), means, recorder)
    session = Session(
        name,
        groups,
        crew,
        buffers=lambda: buffers_of(model),
        is_mean=asked.reduction == "mean",
        num_parameters=alike["num_parameters"],
    )
    agent = Agent(name, environment.coordinators, trust, session, lambda: session.beat(seams.at_work_s()))
    leave_on_terminate(session)
    exits.watch()
    atexit.register(end_member, agent, session, server, groups)
    garbage.spare_collections()
    session.start(agent)
    return _Enlisted(name=name, session=session, crew=crew, recorder=recorder)


def name_of(environment: WorkerEnvironment) -> str:
    """This worker's name among the members of its job."""
    assert environment.member is not None, "the launcher sets it"
    return environment.member


def trust_of(environment: WorkerEnvironment) -> wire.Tls:
    """How this worker makes sure of others, and they of it."""
    assert environment.credentials is not None, "the launcher sets them"
    return wire.Tls(wire.Credentials.load_from(environment.credentials))


def serve_state(environment: WorkerEnvironment, trust: wire.Trust, shelf: Shelf, address: str) -> wire.Server:
    """Where newcomers read this member's state; who is refused there is written down, as at the servers of the job."""
    path = environment.events_path
    record = EventLog(path).write if path else None
    server = wire.Server(trust, shelf.handlers(), roles=("worker",), record=record, complain=_complain)
    return server.start(address)


def _complain(peer: wire.Identity, kind: str, error: Exception) -> None:
    _LOGGER.error("state of this member: %s of %s: %s: %s", kind, peer.name, type(error).__name__, error)


def check_group() -> None:
    """Refuse a script that has made a process group.

    Raises:
        TrainingError: It has.
    """
    if dist.is_initialized():
        raise TrainingError(
            explain(
                "process group of an elastic job",
                got="one that the script has made",
                expected="none before prepare",
                do="Leave out init_process_group: prepare makes a new one whenever workers come or go",
            )
        )


def buffers_of(model: nn.Module) -> list[Tensor]:
    """What becomes the first member's with every reduction."""
    return list(model.buffers())


def num_parameters_of(model: nn.Module) -> int:
    """Tensors that may be trained: those that DDP asks who has used are among them."""
    return sum(1 for _ in model.parameters())


def leave_on_terminate(session: Session) -> None:
    """SIGTERM lets this member finish its step and go, unless the script has a handler; a second one ends it.

    A handler of the script's calls `loader.leave`; so does a script that calls `prepare` in another thread than the
    first, where Python sets none.
    """
    is_ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )

    def leave(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        session.leave()

    if is_ours:
        signal.signal(signal.SIGTERM, leave)


def end_member(agent: Agent, session: Session, server: wire.Server, groups: EpochGroups) -> None:
    """At the end of the process: say that this member is done, unless an exception ends it."""
    if session.is_out:  # nobody waits for anything from it, and its slot waits for another process
        agent.close(_HASTE_S)
        session.close(_HASTE_S)
        server.close(timeout_s=_HASTE_S)
        return
    if not exits.has_failed():
        agent.leave(is_finished=True)
    agent.close()
    session.close()
    server.close(timeout_s=0.5)
    groups.leave()
