"""`prepare` for an elastic job (`ringweave run --elastic`)."""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import rpc
from ringweave.comm import default_group, generation_group
from ringweave.comm.generation_group import GenerationGroups
from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError, explain
from ringweave.membership.client import MembershipClient
from ringweave.planning import modes
from ringweave.rpc.state_transfer import StateServer
from ringweave.telemetry import EventLog
from ringweave.training import timing
from ringweave.training.data import order
from ringweave.training.data.shared_loader import SampleWeightTable, SharedLoader
from ringweave.training.data.sources import OrderSource
from ringweave.training.elastic import ddp, trainer_interface
from ringweave.training.elastic.elastic_membership import ElasticMembership, check_elastic_data
from ringweave.training.elastic.script_collectives import STARTUP_STATE, StartupLog
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.elastic.trainer import ElasticTrainerState, MemberDescription, StateTransport
from ringweave.training.elastic.training_state import IncompleteStep, TrainingState
from ringweave.training.gradients import SampleWeights
from ringweave.training.recorder import ElasticRecorder
from ringweave.training.timing import StepTimer

_LOGGER = logging.getLogger("ringweave")
_EVICTED_CLOSE_TIMEOUT_S = 0.5
"""Time that an evicted process waits at its end for each of its threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options of `prepare`, as the script gives them."""

    mode: str
    reduction: str
    max_samples: int | None
    ddp: dict[str, Any]
    extra_state: Mapping[str, Any]
    on_failure: str
    weight: SampleWeightTable | Callable[[Any], float] | None = None
    """Weights of the samples, or the script's function of a batch."""

    @property
    def sample_weights(self) -> SampleWeightTable | None:
        """Weights of the samples, where a rank's weight of a batch cannot be exchanged.

        Raises:
            TrainingError: The script gives a function of a batch, or drops samples of lost workers.
        """
        if self.weight is not None and self.on_failure == "drop":
            do = "Leave out on_failure: with samples of unequal weights, a step that drops some has no exact mean"
            raise TrainingError(explain("on_failure", got="drop", expected="recompute beside weight", do=do))
        if self.weight is None or isinstance(self.weight, SampleWeightTable):
            return self.weight
        what, got = "weight", "a function of a batch"
        do = "Give the number of tokens, or the weight, of each sample, so that all workers know that of a whole batch"
        expected = "one number for each sample under --elastic and in modes with a parameter server"
        raise TrainingError(explain(what, got=got, expected=expected, do=do))

    @property
    def weight_digest(self) -> str:
        """Text that is the same where the weights are; empty without weights."""
        if self.weight is None:
            return ""
        return self.weight.digest if isinstance(self.weight, SampleWeightTable) else "a function of a batch"


def prepare_elastic(
    triple: tuple[nn.Module, Optimizer, DataLoader],
    options: PrepareOptions,
    environment: WorkerEnvironment,
    timer: StepTimer,
) -> tuple[DistributedDataParallel, Optimizer, SharedLoader]:
    """Join the job and receive its state; return when the first generation with this member has begun.

    Raises:
        TrainingError: The script has its own process group, or data that cannot be shared in this way.
        DisagreementError: The others have prepared something else.
        MembershipError: The job is over, or does not want this worker.
    """
    model, optimizer, loader = triple
    refuse_process_group()
    mode, reason = modes.decide_mode(options.mode, environment.mode, 2)
    spec, seed = order.read_loader(loader), order.shuffle_seed(loader)
    check_elastic_data(spec)
    must_match = {**asdict(spec), "mode": mode, "reduction": options.reduction, "seed": seed}
    sample_weights = options.sample_weights
    must_match["num_parameters"], must_match["on_failure"] = count_parameters(model), options.on_failure
    must_match["weight"] = options.weight_digest
    joined = _join_job((model, optimizer), options, environment, timer, must_match)
    shares = joined.trainer.share_table.latest.shares
    joined.recorder.training_prepared(mode=mode, options=options.mode, reason=reason, shares=shares)
    weights = SampleWeights(num_ranks=1, is_mean=options.reduction == "mean")
    parallel = ddp.wrap_elastic_ddp(model, options.ddp, joined.session, weights, timer)
    timing.attach_timer(timer, parallel, optimizer)
    membership = ElasticMembership(
        joined.session,
        joined.trainer,
        timer,
        IncompleteStep(optimizer, options.extra_state, lambda: bool(joined.trainer.accounting.missing)),
        joined.recorder.epoch_accounted,
        is_mean=weights.is_mean,
    )
    source = OrderSource(loader, spec, seed, membership)
    return parallel, optimizer, SharedLoader(loader, source, weights, timer, sample_weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class _JoinedMember:
    """This process as a member of its job."""

    name: str
    session: ElasticSession
    trainer: ElasticTrainerState
    recorder: ElasticRecorder


def _join_job(
    model_and_optimizer: tuple[nn.Module, Optimizer],
    options: PrepareOptions,
    environment: WorkerEnvironment,
    timer: StepTimer,
    must_match: dict[str, Any],
) -> _JoinedMember:
    """Join the job; return when a generation with this member has begun and it has the job's state."""
    own_name, (model, optimizer) = member_name(environment), model_and_optimizer
    authentication, address, state_server = (
        peer_authentication(environment),
        generation_group.own_address(),
        StateServer(),
    )
    groups = GenerationGroups(address)
    server = start_state_server(environment, authentication, state_server, address)
    description = MemberDescription(
        member=own_name,
        state_address=f"{address} {server.port}",
        max_samples=options.max_samples,
        assumed_speed=default_group.describe_rank(environment, os.environ).speed,
        must_match=must_match,
    )
    recorder = ElasticRecorder(environment, lambda: session.is_primary)
    share_table = ShareTable(must_match["batch_samples"], is_balanced=must_match["mode"] == modes.BALANCED)
    transport, startup_log = StateTransport(state_server=state_server, authentication=authentication), StartupLog()
    training_state = TrainingState(model, optimizer, {**options.extra_state, STARTUP_STATE: startup_log})
    trainer = ElasticTrainerState(description, share_table, timer, training_state, transport, recorder)
    session = ElasticSession(
        own_name,
        groups,
        trainer,
        buffers=lambda: model_buffers(model),
        is_mean=options.reduction == "mean",
        num_parameters=must_match["num_parameters"],
        recomputes=must_match["on_failure"] == "recompute",
    )
    session.repeat_collectives(startup_log)
    membership_client = MembershipClient(
        own_name,
        environment.coordinators,
        authentication,
        session,
        lambda: session.heartbeat(trainer_interface.busy_s()),
    )
    leave_on_sigterm(session)
    trainer_interface.record_exit_failures()
    atexit.register(shut_down_member, membership_client, session, server, groups)
    timing.freeze_garbage_collector()
    session.start(membership_client)
    return _JoinedMember(name=own_name, session=session, trainer=trainer, recorder=recorder)


def member_name(environment: WorkerEnvironment) -> str:
    """Return this worker's name among the members of its job."""
    assert environment.member is not None, "the launcher sets it"
    return environment.member


def peer_authentication(environment: WorkerEnvironment) -> rpc.TlsAuthentication:
    """Load this worker's credentials and return its authentication of peers."""
    assert environment.credentials is not None, "the launcher sets them"
    return rpc.TlsAuthentication(rpc.Credentials.load_from(environment.credentials))


def start_state_server(
    environment: WorkerEnvironment, authentication: rpc.PeerAuthentication, state_server: StateServer, address: str
) -> rpc.RpcServer:
    """Start the server from which joining members read this member's state; it logs refused peers."""
    path = environment.events_path
    record = EventLog(path).write if path else None
    server = rpc.RpcServer(
        authentication,
        state_server.handlers(),
        roles=("worker",),
        write_event=record,
        on_handler_error=_log_server_error,
    )
    return server.start(address, within=environment.ports)


def _log_server_error(peer: rpc.Identity, kind: str, error: Exception) -> None:
    _LOGGER.error("state of this member: %s of %s: %s: %s", kind, peer.name, type(error).__name__, error)


def refuse_process_group() -> None:
    """Refuse a script that has created a process group.

    Raises:
        TrainingError: There is a process group.
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


def model_buffers(model: nn.Module) -> list[Tensor]:
    """Return the tensors that every reduction sets to the first member's values."""
    return list(model.buffers())


def count_parameters(model: nn.Module) -> int:
    """Return the number of tensors that may be trained; they include those in DDP's map of used parameters."""
    return sum(1 for _ in model.parameters())


def leave_on_sigterm(session: ElasticSession) -> None:
    """Let SIGTERM finish this member's step and leave, unless the script has a handler; a second SIGTERM ends it.

    A handler of the script has to call `loader.leave`; so has a script that calls `prepare` outside of the main thread,
    where Python sets no handlers.
    """
    is_ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )

    def leave(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        session.leave_nowait()

    if is_ours:
        signal.signal(signal.SIGTERM, leave)


def shut_down_member(
    membership_client: MembershipClient, session: ElasticSession, server: rpc.RpcServer, groups: GenerationGroups
) -> None:
    """Announce at the end of the process that this member has finished, unless an exception ends it."""
    if session.has_stopped:  # no member waits for it, and its slot waits for another process
        membership_client.close(_EVICTED_CLOSE_TIMEOUT_S)
        session.close(_EVICTED_CLOSE_TIMEOUT_S)
        server.close(timeout_s=_EVICTED_CLOSE_TIMEOUT_S)
        return
    if not trainer_interface.script_has_failed():
        membership_client.leave_membership(is_finished=True)
    membership_client.close()
    session.close()
    server.close(timeout_s=0.5)
    groups.leave_group()
