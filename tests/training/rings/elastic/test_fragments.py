"""Sites of an elastic job push fragments as sites of a fixed membership do; with a real server, without processes."""

import copy
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringweave import rpc
from ringweave.errors import RemoteError
from ringweave.param_server import flat
from ringweave.param_server.client import RingClient
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ParameterGroup, ServerSetup
from ringweave.param_server.service import ParameterService
from ringweave.training import Local
from ringweave.training.outer_optimizer import OuterOptimizer
from ringweave.training.rings.ring_progress import RingCursor, UnpushedSamples
from ringweave.training.rings.ring_worker import RingWorker

NUM_FRAGMENTS, ROUND_STEPS, NUM_SITES = 4, 2, 2
SETTINGS = Local(inner_steps=NUM_FRAGMENTS * ROUND_STEPS, wire="exact")


class Connection:
    """A connection to a server in this process."""

    def __init__(self, service: ParameterService, ring: int) -> None:
        self._handlers = {each.message: each for each in service.handlers()}
        self._peer = rpc.Identity(job="test", role="worker", name=f"{ring}.0")

    def start(self, *arguments: Any, **named: Any) -> Any:
        begun = copy.copy(self)
        begun.wait = lambda: self.call(*arguments, **named)
        begun.cancel = lambda: None
        return begun

    def close(self) -> None:
        """Nothing is open."""

    def call(self, message: Any, content: Any = (), *, timeout_s: float, into: Any = None) -> rpc.RpcReply:
        deadline_s = time.monotonic() + min(timeout_s, 20.0)
        held = [memoryview(bytearray(each)) for each in content]
        call = rpc.RpcCall(peer=self._peer, message=message, buffers=held, deadline_s=deadline_s)
        answer = self._handlers[type(message)].handle(call)
        reply = answer if isinstance(answer, rpc.RpcReply) else rpc.RpcReply(answer)
        for room, sent in zip(into or (), reply.buffers, strict=True):
            room[:] = sent
        return reply


class Member:
    """A site of one worker: it fetches all itself."""

    starts_pushes_at_once = misses_samples = False
    is_representative = is_connected = True

    def __init__(self, service: ParameterService, ring: int, cursor: RingCursor | None = None) -> None:
        self.model = make_model()
        self.cursor, self.samples = cursor or RingCursor(ring=ring), UnpushedSamples()
        self.error: RemoteError | None = None
        connection: Any = Connection(service, ring)
        self._client = RingClient([lambda: connection], ring)
        setup = make_setup()
        self.worker = RingWorker(
            self, list(self.model.parameters()), local_steps=ROUND_STEPS, fragments=setup.fragments
        )
        assert self.worker.changes is not None
        self.changes = self.worker.changes
        self.num_steps = 0

    def client(self) -> Any:
        return self if self.error is not None else self._client

    def push_and_pull(self, *_: Any) -> Any:
        error, self.error = self.error, None
        assert error is not None
        raise error

    def last_words(self) -> str:
        return json.dumps({"steps": self.num_steps})

    def change_atomically(self, change: Callable[[], None]) -> None:
        change()

    def broadcast_from_first(self, fetch: Callable[[], Any], tensors: Sequence[Tensor] = ()) -> Any:
        del tensors
        return json.loads(json.dumps(fetch()))

    def step(self, changes: Sequence[Tensor]) -> None:
        """A local step of four samples, which moves the parameters by these."""
        self.changes.send_pending()
        with torch.no_grad():
            for own, change in zip(self.model.parameters(), changes, strict=True):
                own.add_(change)
        self.num_steps += 1
        self.samples.add(4, 1 / NUM_SITES)
        self.samples.note_spans(0, 0, [(4 * NUM_SITES * self.num_steps + 4 * self.cursor.ring, 4)])
        self.changes.count_step()

    @property
    def values(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 2)).double()


def make_setup() -> ServerSetup:
    parameters = list(make_model().parameters())
    options = {"lr": SETTINGS.outer_lr, "momentum": SETTINGS.outer_momentum, "nesterov": True}
    return ServerSetup(
        tensors=flat.tensor_specs([(str(index), each) for index, each in enumerate(parameters)]),
        optimizer="SGD",
        groups=[ParameterGroup(parameters=list(range(len(parameters))), options=options)],
        rings=[[site] for site in range(NUM_SITES)],
        overlaps=True,
        compensation=0.0,
        shares=[[1]] * NUM_SITES,
        fragments=[list(each) for each in OuterOptimizer(make_model(), SETTINGS, NUM_FRAGMENTS).fragments],
    )


def begin() -> tuple[ParameterService, list[Member]]:
    service, setup = ParameterService(), make_setup()
    members = [Member(service, site) for site in range(NUM_SITES)]
    first = flat.tensors_of_setup(setup)
    torch._foreach_copy_(first.views, members[0].values)
    members[0].client().start_job(setup, first.buffers())
    for member in members:
        member.worker.refresh()
    return service, members


def changes_of(step: int, site: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + site)
    return [0.1 * torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in make_model().parameters()]


def end_pass(members: Sequence[Member]) -> None:
    for member in members:  # else the first one would wait for what the second one sends later in this thread
        member.changes.send_pending()
    for member in members:
        member.changes.push_rest()
        member.client().leave_ring(is_for_good=False)
    for member in members:
        member.worker.refresh()


def samples_on(service: ParameterService) -> int:
    assert service.job is not None
    return sum(count for _, count in service.job.position.done)


class FixedSite:
    """A site of the fixed path, with its outer optimizer."""

    def __init__(self) -> None:
        self.model = make_model()
        self.outer = OuterOptimizer(self.model, SETTINGS, NUM_FRAGMENTS)
        self.outer.take_parameters_once()
        self.running: Any = None

    def step(self, changes: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for own, change in zip(self.model.parameters(), changes, strict=True):
                own.add_(change)


def end_fixed(sites: Sequence[FixedSite]) -> None:
    messages = [each.running.encode(SETTINGS.format) for each in sites if each.running is not None]
    for each in sites if messages else ():
        each.running.set_mean(SETTINGS.format, messages, [1.0] * len(messages))
        each.outer.apply_step(each.running)


def begin_fixed(sites: Sequence[FixedSite], fragments: Sequence[int]) -> None:
    for each in sites:
        each.running = each.outer.begin_step(fragments)


@pytest.mark.parametrize("num_rounds", [3 * NUM_FRAGMENTS, 3 * NUM_FRAGMENTS + 1])
def test_the_parameters_are_those_of_a_fixed_membership_after_each_round(num_rounds: int) -> None:
    _, members = begin()
    fixed = [FixedSite() for _ in members]
    for step in range(num_rounds * ROUND_STEPS):
        for site, (member, like) in enumerate(zip(members, fixed, strict=True)):
            member.step(changes_of(step, site))
            like.step(changes_of(step, site))
        if (step + 1) % ROUND_STEPS == 0:
            end_fixed(fixed)
            begin_fixed(fixed, [step // ROUND_STEPS % NUM_FRAGMENTS])
        for member, like in zip(members, fixed, strict=True):
            torch.testing.assert_close(member.values, [each.detach() for each in like.model.parameters()])
    end_pass(members)
    end_fixed(fixed)
    begin_fixed(fixed, range(NUM_FRAGMENTS))
    end_fixed(fixed)
    assert all(map(torch.equal, members[0].values, members[1].values)), "the same bits on all sites"
    torch.testing.assert_close(members[0].values, [each.detach() for each in fixed[0].model.parameters()])


def test_samples_count_once_all_fragments_have_been_pushed_since() -> None:
    """So what a lost site had pushed in a part of the parameters only counts as lost."""
    service, members = begin()
    per_round = 4 * ROUND_STEPS * NUM_SITES
    for number in range(2 * NUM_FRAGMENTS):
        for step in range(ROUND_STEPS):
            for site, member in enumerate(members):
                member.step(changes_of(ROUND_STEPS * number + step, site))
        for member in members:
            member.changes.send_pending()
        for member in members:
            member.changes.wait_answered()
        num_whole = max(0, number + 1 - (NUM_FRAGMENTS - 1))
        assert samples_on(service) == num_whole * per_round
        assert service.job is not None
        assert service.job.model.progress.total == pytest.approx(num_whole * ROUND_STEPS)
        reported = [json.loads(text)["steps"] for text in service.job.ring_progress.values() if text]
        assert set(reported) == ({num_whole * ROUND_STEPS} if num_whole else set())
    end_pass(members)
    assert samples_on(service) == 2 * NUM_FRAGMENTS * per_round
    assert all(not member.cursor.partly_pushed and not member.cursor.num_since_level for member in members)


def train(members: Sequence[Member], first: int, end: int) -> None:
    for step in range(first, end):
        for site, member in enumerate(members):
            member.step(changes_of(step, site))


def test_a_member_that_joins_in_the_middle_of_a_cycle_goes_on_with_the_same_bits() -> None:
    """With the cursor, and the tensors that come along, it represents the site from there on."""
    (service, members), (_, undisturbed) = begin(), begin()
    middle, end = (NUM_FRAGMENTS + 2) * ROUND_STEPS, 3 * NUM_FRAGMENTS * ROUND_STEPS
    train(members, 0, middle)
    old = members[0]
    old.changes.send_pending()  # the server may have it, and no member has the answer
    joined = Member(service, 0)
    joined.cursor.load_json(json.loads(json.dumps(old.cursor.to_json())))
    for own, theirs in zip(joined.changes.joining_tensors, old.changes.joining_tensors, strict=True):
        own.copy_(theirs)
    with torch.no_grad():
        for own, value in zip(joined.model.parameters(), old.values, strict=True):
            own.copy_(value)
    joined.num_steps = old.num_steps
    train(after := [joined, members[1]], middle, end)
    end_pass(after)
    train(undisturbed, 0, end)
    end_pass(undisturbed)
    for member in (*after, undisturbed[1]):
        assert all(map(torch.equal, member.values, undisturbed[0].values))
    assert samples_on(service) == 4 * NUM_SITES * joined.num_steps, "each sample once"


def test_after_a_push_that_came_too_late_the_site_takes_all_fragments() -> None:
    _, members = begin()
    late, other = members
    for step in range(NUM_FRAGMENTS * ROUND_STEPS):
        for site, member in enumerate(members):
            if step == NUM_FRAGMENTS * ROUND_STEPS - 1 and member is late:
                late.changes.wait_answered()
            member.step(changes_of(step, site))
    late.error = RemoteError("push 4 of ring 0: 'no grant'", "ExpiredGrantError")
    other.changes.send_pending()
    for step in range(ROUND_STEPS):
        late.step(changes_of(step, 0))
    assert not late.cursor.partly_pushed, "lost"
    assert (late.cursor.num_since_level, late.samples.num_samples, late.cursor.pending) == (0, 0, None)
    newest = FlatTensors(late.worker.specs, fragments=late.worker.fragments)
    late.client().pull(late.cursor.num_pushed, newest.buffers())
    assert all(map(torch.equal, late.values, newest.views))


def test_all_sites_push_after_as_many_steps_as_the_one_that_needs_most() -> None:
    service, members = begin()
    for member, wanted in zip(members, (3, 7), strict=True):
        member.changes._max_steps, member.changes._wanted_steps = 100, wanted
        member.changes._derive_steps = lambda _, wanted=wanted: wanted
    for step in range(ROUND_STEPS):
        for site, member in enumerate(members):
            member.step(changes_of(step, site))
    for member in members:
        member.changes.send_pending()
    assert all(member.changes._fetch_answer()["local_steps"] == 7 for member in members)
    assert service.job is not None
    assert service.job.local_steps == {0: 3, 1: 7}
