"""A world that follows the formula, for tests of the adviser."""

import random
from collections.abc import Mapping

from ringweave import cost, topology
from ringweave.planning import Plan
from ringweave.planning.autotune.link_survey import LinkSurvey, SurveyHistory
from ringweave.planning.autotune.tuner import Autotuner
from ringweave.planning.autotune.tuning_messages import TuningDecision, TuningReport, message_class
from ringweave.planning.group_planner import GroupPlacement
from ringweave.schedules import NATIVE

TEXT = "name: eight\nnodes: [{name: a, nic: 200Mbit/s, devices: 1, count: 8}]\nlatency: 50us\n"
SIZE = 25_000_000
NIC = ("a-1->core", "core->a-1")


class World:
    """True rates, a clock, and what every rank does with the rulings."""

    def __init__(
        self,
        text: str = TEXT,
        noise: float = 0.0,
        tuned: Mapping[str, str] | None = None,
        probed: Mapping[str, float] | None = None,
        history: SurveyHistory | None = None,
    ) -> None:
        cluster = topology.loads(text)
        nodes = tuple(node.name for node in cluster.nodes for _ in node.devices)
        self.where = GroupPlacement(cluster=cluster, nodes=nodes, rates=probed or {})
        known = self.where.rates_of_links(history.rates) if history else {}
        self.plan = self.where.plan(known)
        self.estimates: dict[str, float] = {}
        self.num_estimates = 0
        self.adviser = Autotuner(self.where, self.plan, tuned, self._estimate, history, known)
        self.rates: dict[str, float] = {}
        self.host_factor = 1.1
        self.compute_s = 0.0
        self.now_s = 0.0
        self.num_surveys = 0
        self.notes: list[tuple[str, dict]] = []
        self._rng, self._noise = random.Random(1), noise
        self._settled: dict[str, tuple[str, int]] = {}
        self._window: dict[str, list[float]] = {}
        self._trial_s = float("nan")
        self._known: dict[object, float] = {}

    def step(self, num_bytes: int = SIZE) -> tuple[str, float]:
        """One collective: what it took, and its seconds."""
        number = message_class(num_bytes)
        name, left = self._settled.get(number, ("", 0))
        is_trial = False
        if left <= 0:
            ruling = self._consult(num_bytes)
            name, left, is_trial = ruling.schedule, ruling.next_in, ruling.is_trial
            self._settled[number] = (name, 0 if is_trial else left)
        seconds = self.seconds(name, num_bytes) * (1 + self._noise * self._rng.uniform(-1, 1))
        self.now_s += seconds + self.compute_s
        if is_trial:
            self._trial_s = seconds
        else:
            self._settled[number] = (name, left - 1)
            self._window.setdefault(number, []).append(seconds / num_bytes)
        return name, seconds

    def _estimate(self, plan: Plan, num_bytes: int, rates: Mapping[str, float]) -> Mapping[str, float]:
        """What simulations say in this world: mostly nothing."""
        self.num_estimates += 1
        return self.estimates

    def seconds(self, name: str, num_bytes: int) -> float:
        """By the formula, at the true rates; the native backend is a ring with something on top."""
        key = (tuple(self.rates.items()), self.plan, name, num_bytes)
        if key not in self._known:
            self._known[key] = self._predict(name, num_bytes)
        return self._known[key] * (self.host_factor if name == NATIVE else 1.0)

    def _predict(self, name: str, num_bytes: int) -> float:
        net = self.where.network(self.rates)
        plan = self.plan if name != NATIVE else self.where.plan({})
        choice = plan.choose(num_bytes, "ring" if name == NATIVE else name)
        where = cost.vertices_of_ranks(net, self.where.nodes)
        asked = cost.schedule_demand(plan.generate(choice.schedule), net, where)
        return asked.predicted_s(num_bytes, num_segments=choice.num_segments, lag=choice.lag)

    def _consult(self, num_bytes: int) -> TuningDecision:
        window = tuple(self._window.pop(message_class(num_bytes), []))
        report = TuningReport(num_bytes=num_bytes, trial_s=self._trial_s, window=window)
        self._trial_s = float("nan")
        ruling = TuningDecision.parse(str(self.adviser.decide(report, self.now_s)))
        if ruling.phases:
            self.num_surveys += 1
            true = LinkSurvey(self.where.network(self.rates), tuple(dict.fromkeys(self.where.nodes)))
            rates = [0.95 * rate for phase in ruling.phases for rate in true._expected(phase)]
            self.now_s += 1.0
            ruling = TuningDecision.parse(str(self.adviser.decide_after_survey(num_bytes, rates, self.now_s, 1.0)))
        if ruling.plan:
            self.plan = Plan.parse(ruling.plan)
            self._settled.clear()
            self._window.clear()
        self.notes += self.adviser.take_events()
        return ruling

    def of_kind(self, kind: str) -> list[dict]:
        return [fields for name, fields in self.notes if name == kind]


def cut(world: World, factor: float = 0.25) -> None:
    world.rates = dict.fromkeys(NIC, 25e6 * factor)


def steps_until_changed(world: World, most: int = 60, num_bytes: int = SIZE) -> int:
    before = len(world.of_kind("plan_changed"))
    for count in range(1, most + 1):
        world.step(num_bytes)
        if len(world.of_kind("plan_changed")) > before:
            return count
    raise AssertionError("no new plan")
