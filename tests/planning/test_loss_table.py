"""The loss table: what the package's file holds, what is looked up between its rows, and what is refused."""

import math

import pytest

from ringweave.planning import loss_table
from ringweave.planning.loss_table import LossTable, load_loss_table, parse_loss_table
from ringweave.training import Local


def row(steps: int, *increases: float, sites: int = 2, wire: str = "int4") -> dict:
    names = {"method": "local", "format": wire, "inner_steps": steps, "num_sites": sites}
    return {**names, "increase": {"task": list(increases)}}


def table(*rows: dict) -> LossTable:
    settings = {"fragments": 4, "outer_lr": 0.7, "outer_momentum": 0.3, "inner_lr_factor": None}
    return parse_loss_table({"local": settings, "rows": list(rows)})


def test_the_packages_table_has_what_auto_may_take() -> None:
    found = load_loss_table()
    assert set(found.wires) == {"bf16", "int8", "int4"}
    steps_by_wire = {wire: {steps for _, name, steps in found.local if name == wire} for _, wire, _ in found.local}
    all_steps = {1, 4, 16, 64, 256}
    assert Local().wire in steps_by_wire
    assert steps_by_wire == dict.fromkeys(("int2", "int4", "int8", "exact"), all_steps)
    assert found.local_settings == {name: getattr(Local(), name) for name in loss_table.LOCAL_SETTINGS}
    for each in [*found.wires.values(), *found.local.values()]:
        assert -0.5 < each.lowest <= each.mean <= each.highest < 3


def test_the_defaults_of_mode_local_stay_within_a_hundredth_up_to_64_inner_steps() -> None:
    assert load_loss_table().max_inner_steps(2, Local().wire, 0.01) == 64


def test_fewer_bits_of_a_gradient_cost_more() -> None:
    wires = load_loss_table().wires
    assert wires["bf16"].highest < wires["int8"].highest < wires["int4"].highest


def test_between_measured_steps_the_worse_of_both_counts() -> None:
    found = table(row(16, 0.01, 0.02), row(64, 0.0, 0.01), row(256, 0.05))
    assert [found.of_local(2, "int4", steps).highest for steps in (1, 16, 20, 64, 65, 256)] == [  # pyrefly: ignore
        *(0.02, 0.02, 0.02, 0.01, 0.05, 0.05)
    ]
    assert found.of_local(2, "int4", 257) is None
    assert found.of_local(3, "int4", 16) is None
    assert found.of_local(2, "int2", 16) is None


@pytest.mark.parametrize(("bound", "expected"), [(0.005, 0), (0.01, 16), (0.04, 64), (0.5, 256)])
def test_the_most_inner_steps_are_those_up_to_which_all_are_within_the_bound(bound: float, expected: int) -> None:
    found = table(row(1, 0.3), row(16, 0.01), row(64, 0.03), row(256, 0.05))
    assert found.max_inner_steps(2, "int4", bound) == expected


@pytest.mark.parametrize("increases", [[], [math.nan], [math.inf], [-1.0]])
def test_increases_that_nobody_can_measure_are_refused(increases: list[float]) -> None:
    with pytest.raises(ValueError, match="expected numbers above -1 of each task and seed"):
        table(row(16, *increases))
