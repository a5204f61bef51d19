"""Lives of jobs for the tests: requests, a driver that does what `reconcile` says, and lives that are written down."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ringweave.jobs import admission, records
from ringweave.jobs.reconcile import reconcile
from ringweave.jobs.records import EndCause, GroupPhase, Job
from ringweave.jobs.request import DeletionPolicy, ElasticRequest, JobRequest, NodeRequest
from ringweave.jobs.states import JobState
from tests.fakes.job_runtime import FakeJobRuntime

KEEP, ON_FAILURE, DELETE = DeletionPolicy.KEEP, DeletionPolicy.KEEP_ON_FAILURE, DeletionPolicy.DELETE


def a_job(
    policies=(DELETE, DELETE),
    *,
    max_retries: int = 1,
    ttl_s: float | None = None,
    suspend: bool = False,
    least: int | None = None,
    mode: str = "auto",
    standby: bool = False,
) -> Job:
    """A job that gets three workers on each of its nodes, elastic if it is said how many go on at least."""
    nodes = tuple(
        NodeRequest(name=f"n{index}", capacity=3, max_retries=max_retries, deletion=policy)
        for index, policy in enumerate(policies)
    )
    elastic = None if least is None else ElasticRequest(min=least)
    total = 3 * len(nodes)
    request = JobRequest(
        name="text",
        num_workers=total,
        script="s.py",
        nodes=nodes,
        ttl_s=ttl_s,
        suspend=suspend,
        elastic=elastic,
        mode=mode,
        standby=standby,
    )
    counts = request.split.counts
    assert counts is not None
    return records.new_job(request, requester="ann", counts=counts, now=0.0)


def look(place: FakeJobRuntime) -> list[records.JobAction]:
    """What is to be done now; and everything that must hold of every answer does."""
    if place.job is None:
        return []
    observed = place.observe()
    found = list(reconcile(place.job, observed, place.clock_s))
    for action in found:
        if isinstance(action, records.SaveRecord):
            saved = replace(place.job, record=action.record)
            again = reconcile(saved, observed, place.clock_s)
            rest = [other for other in found if other is not action]
            assert list(again) == rest, "a second look at the same must only ask for what is not done yet"
            assert records.RECORD_JSON.parse(records.RECORD_JSON.dump(action.record)) == action.record
    return found


def settle(place: FakeJobRuntime, *, crash_after: int | None = None) -> int:
    """Look and do until nothing is to be done; the number of actions done. Crashing, it ends after some of them."""
    done = 0
    for _ in range(20):
        asked = [action for action in look(place) if not isinstance(action, records.RequeueAt)]
        if not asked:
            return done
        for action in asked:
            if done == crash_after:
                return done
            place.apply(action)
            done += 1
    raise AssertionError(f"never settles: {asked}")


def running(*policies: DeletionPolicy, **options) -> FakeJobRuntime:
    """A place in which all groups of a job run."""
    place = FakeJobRuntime(job=a_job(policies or (DELETE, DELETE), **options))
    for _ in range(4):
        settle(place)
        place.pass_time()
    settle(place)
    assert place.job is not None
    assert place.job.record.state is JobState.RUNNING
    return place


def record_of(place: FakeJobRuntime) -> records.JobRecord:
    assert place.job is not None
    return place.job.record


def ask(place: FakeJobRuntime, verb: str) -> None:
    """What somebody types."""
    assert place.job is not None
    place.job = replace(place.job, desired=admission.apply_verb(verb, place.job, place.clock_s))


@dataclass(frozen=True)
class Life:
    """A life that is written down: what the world does, told by what it looks like, never by the time."""

    name: str
    make: Callable[[], Job]
    script: tuple[tuple[Callable[[FakeJobRuntime], bool], Callable[[FakeJobRuntime], None]], ...]
    """(when, what) in order: each happens once, when its turn has come and the world looks like it."""

    def place(self) -> FakeJobRuntime:
        return FakeJobRuntime(job=self.make())


def all_run(place: FakeJobRuntime) -> bool:
    assert place.job is not None
    known = [(node, place.job.record.nodes[node]) for node in place.job.used_nodes]
    current = [place.groups.get((node, record.attempt)) for node, record in known if record.ended is None]
    return len(current) == len(known) and all(group and group.phase is GroupPhase.RUNNING for group in current)


def in_state(*names: str) -> Callable[[FakeJobRuntime], bool]:
    return lambda place: place.job is not None and place.job.record.state in names


def quiet(*names: str) -> Callable[[FakeJobRuntime], bool]:
    """In one of these states, and nothing of it lives or is about to go."""
    reached = in_state(*names)
    return lambda place: (
        reached(place) and not any(group.is_terminating or group.phase.is_alive for group in place.groups.values())
    )


def end(*keys: tuple[int, int], cause: EndCause | None = None) -> Callable[[FakeJobRuntime], None]:
    def happen(place: FakeJobRuntime) -> None:
        for key in keys:
            place.end_group(key, cause)

    return happen


def end_all(place: FakeJobRuntime) -> None:
    for key, group in list(place.groups.items()):
        if group.phase is GroupPhase.RUNNING:
            place.end_group(key)


def verb(name: str) -> Callable[[FakeJobRuntime], None]:
    return lambda place: ask(place, name)


def made(node: int, attempt: int) -> Callable[[FakeJobRuntime], bool]:
    return lambda place: (node, attempt) in place.groups


LIVES = (
    Life("finishes", a_job, ((all_run, end_all),)),
    Life("finishes and is forgotten", lambda: a_job(ttl_s=5.0), ((all_run, end_all),)),
    Life("three nodes, kept by policy", lambda: a_job((KEEP, ON_FAILURE, DELETE)), ((all_run, end_all),)),
    Life("a node is killed", a_job, ((all_run, end((1, 1), cause=EndCause.PLATFORM)), (all_run, end_all))),
    Life(
        "a node vanishes",
        lambda: a_job((DELETE, DELETE, DELETE)),
        ((all_run, lambda place: place.lose_group((1, 1))), (all_run, end_all)),
    ),
    Life(
        "retries are spent",
        lambda: a_job((ON_FAILURE, DELETE)),
        ((all_run, end((0, 1), cause=EndCause.PLATFORM)), (all_run, end((0, 2), cause=EndCause.PLATFORM))),
    ),
    Life(
        "the script fails, is mended and tried again",
        lambda: a_job((KEEP, DELETE)),
        ((all_run, end((0, 1), cause=EndCause.PROGRAM)), (quiet("Failed"), verb("retry")), (all_run, end_all)),
    ),
    Life(
        "fails before it starts",
        a_job,
        ((made(0, 1), end((0, 1), cause=EndCause.PLATFORM)), (all_run, end_all)),
    ),
    Life(
        "one had finished already",
        a_job,
        ((all_run, end((0, 1))), (made(0, 1), end((1, 1), cause=EndCause.PLATFORM)), (all_run, end_all)),
    ),
    Life(
        "suspended and resumed",
        a_job,
        ((all_run, verb("suspend")), (quiet("Suspended"), verb("resume")), (all_run, end_all)),
    ),
    Life(
        "submitted suspended", lambda: a_job(suspend=True), ((quiet("Suspended"), verb("resume")), (all_run, end_all))
    ),
    Life("stopped", lambda: a_job((KEEP, DELETE)), ((all_run, verb("stop")),)),
    Life(
        "stopped and tried again",
        a_job,
        ((all_run, verb("stop")), (quiet("Stopped"), verb("retry")), (all_run, end_all)),
    ),
    Life("deleted while it runs", lambda: a_job((KEEP, DELETE)), ((all_run, verb("delete")),)),
    Life("deleted while it gathers", a_job, ((made(1, 1), verb("delete")),)),
    Life(
        "elastic: a node is killed, and comes back",
        lambda: a_job((DELETE,) * 3, least=3),
        ((all_run, end((1, 1), cause=EndCause.PLATFORM)), (all_run, end_all)),
    ),
    Life(
        "elastic: a node may not be tried again",
        lambda: a_job((DELETE, KEEP, DELETE), least=3, max_retries=0),
        (
            (all_run, end((1, 1), cause=EndCause.PLATFORM)),
            (in_state("Running"), end_all),
        ),
    ),
    Life(
        "elastic: too few are left",
        lambda: a_job((DELETE,) * 3, least=6),
        ((all_run, end((1, 1), (2, 1), cause=EndCause.PLATFORM)), (all_run, end_all)),
    ),
    Life(
        "elastic: one is lost when another one has finished",
        lambda: a_job((DELETE, KEEP, DELETE), least=3),
        ((all_run, end((0, 1))), (made(0, 1), end((1, 1), cause=EndCause.PLATFORM)), (made(2, 1), end((2, 1)))),
    ),
    Life(
        "its config is removed by somebody",
        a_job,
        ((all_run, lambda place: place.apply(records.DeleteConfig())), (all_run, end_all)),
    ),
)


def live(life: Life, *, crash_after: int | None = None, always_crash: bool = False, ticks: int = 60) -> FakeJobRuntime:
    """Lead the life to its end; what is left.

    Args:
        life: Which one.
        crash_after: The supervisor dies after so many actions in all, and is started again after a tick.
        always_crash: It dies after every single action.
        ticks: How long to go on.
    """
    place, done, script = life.place(), 0, list(life.script)
    for _ in range(ticks * (8 if always_crash else 1)):
        limit = 1 if always_crash else None if crash_after is None or done > crash_after else crash_after - done
        done += settle(place, crash_after=limit)
        if crash_after is not None and done == crash_after:
            done += 1
        elif place.job is not None and script and script[0][0](place):
            script.pop(0)[1](place)
        place.pass_time()
    assert not script, f"the life stops before {len(script)} more things could happen"
    settle(place)
    return place


def end_state(place: FakeJobRuntime) -> tuple:
    """What must not depend on crashes."""
    left = {key: group.phase for key, group in place.groups.items()}
    if place.job is None:
        return (None, left, place.has_config)
    record = place.job.record
    nodes = [
        (known.attempt, known.retries, known.state, [end.cause for end in known.history]) for known in record.nodes
    ]
    job = (record.state, record.outcome, record.run, record.round)
    return (job, nodes, left, place.has_config, sorted(place.created))
