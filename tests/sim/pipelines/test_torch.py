"""Our orders and programs beside what torch.distributed.pipelining itself does."""

from types import SimpleNamespace
from typing import Any

import pytest

from ringweave.sim import pipeline_schedules
from ringweave.sim.pipeline_schedules import stage_programs

schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
CASES = [(1, 1), (1, 3), (2, 2), (2, 5), (4, 4), (4, 9), (3, 12)]
BLOCKING = {"1f1b": schedules.Schedule1F1B, "gpipe": schedules.ScheduleGPipe}


class RecordingStage:
    """Says what it was told to do, in our words."""

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.done: list[tuple[str, tuple[str, ...]]] = []

    def forward_one_chunk(self, index: int, *_: Any, **__: Any) -> None:
        self.done.append(("compute", (f"{self.stage_index}F{index}",)))

    def backward_one_chunk(self, index: int, **_: Any) -> None:
        self.done.append(("compute", (f"{self.stage_index}B{index}",)))

    def get_fwd_recv_ops(self, index: int) -> list[str]:
        return [f"{self.stage_index}RECV_F{index}"] if self.stage_index > 0 else []

    def get_fwd_send_ops(self, index: int) -> list[str]:
        return [f"{self.stage_index}SEND_F{index}"] if self.stage_index < self.num_stages - 1 else []

    def get_bwd_recv_ops(self, index: int) -> list[str]:
        return [f"{self.stage_index}RECV_B{index}"] if self.stage_index < self.num_stages - 1 else []

    def get_bwd_send_ops(self, index: int) -> list[str]:
        return [f"{self.stage_index}SEND_B{index}"] if self.stage_index > 0 else []

    def perform_reduce_grad(self, _: int) -> None: ...


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch):
    """`recorded(schedule class, stage, stages, microbatches)`: the instructions that torch's own loop follows."""

    def record(schedule: type, stage_index: int, num_stages: int, num_microbatches: int) -> list:
        stage = RecordingStage(stage_index, num_stages)

        def begin(ops: list[str], desc: str | None = None) -> list[str]:
            stage.done.append(("begin", tuple(ops)))
            return list(ops)

        monkeypatch.setattr(schedules, "_batch_p2p", begin)
        monkeypatch.setattr(schedules, "_sorted_batch_p2p", lambda ops, desc=None: {0: begin(ops)})
        monkeypatch.setattr(schedules, "_wait_batch_p2p", lambda work: stage.done.append(("wait", tuple(work))))
        fake: Any = SimpleNamespace(
            _stage=stage,
            _num_stages=num_stages,
            _n_microbatches=num_microbatches,
            scale_grads=True,
            _check_inputs=lambda *_: ([()] * num_microbatches, [{}] * num_microbatches),
            _initialize_stage=lambda *_: None,
            _maybe_compute_loss=lambda *_: None,
            _maybe_get_loss=lambda *_: None,
            _update_losses=lambda *_: None,
        )
        schedule._step_microbatches(fake)
        return [(what, ops) for what, ops in stage.done if ops]

    return record


def in_words(program: list) -> list[tuple[str, tuple[str, ...]]]:
    """One wait for several transfers is, with torch, several waits; so all are cut into single ones."""
    return [
        (each.what, part)
        for each in program
        for part in (
            [(str(action),) for action in each.actions]
            if each.what == "wait"
            else [tuple(str(action) for action in each.actions)]
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKING)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), CASES)
def test_blocking_programs_are_torchs(name: str, num_stages: int, num_microbatches: int, recorded) -> None:
    ours = stage_programs(pipeline_schedules.generate_pipeline_schedule(name, num_stages, num_microbatches), "blocking")
    for stage_index, program in enumerate(ours):
        theirs = recorded(BLOCKING[name], stage_index, num_stages, num_microbatches)
        split = [(what, one) for what, ops in theirs for one in ([(op,) for op in ops] if what == "wait" else [ops])]
        assert in_words(program) == split


@pytest.mark.slow
@pytest.mark.parametrize("name", pipeline_schedules.PIPELINE_SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), CASES)
def test_torchs_runtime_takes_our_orders(name: str, num_stages: int, num_microbatches: int) -> None:
    """It parses them, puts its transfers in, and its own dry run does not hang."""
    order = pipeline_schedules.generate_pipeline_schedule(name, num_stages, num_microbatches)
    actions = {
        rank: [schedules._Action.from_str(part) for part in line.split(",")]
        for rank, line in enumerate(str(order).splitlines())
    }
    assert [",".join(map(str, row)) for row in actions.values()] == str(order).splitlines()
    schedules._validate_schedule(actions, num_stages, num_stages, num_microbatches)
    with_comms = schedules._add_send_recv(actions, lambda stage: stage, num_stages)
    schedules._simulate_comms_compute(with_comms, lambda stage: stage, num_stages)
