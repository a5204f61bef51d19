"""Plot of an adapting pipeline: blocks of each device over train steps, predicted and measured step times."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringweave.errors import UsageError
from ringweave.plots import figures

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPeriod:
    """Train steps under one partition."""

    begin_step: int
    end_step: int
    splits: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """A window of train steps."""

    begin_step: int
    end_step: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineHistory:
    """History of one adapting pipeline from its event log."""

    num_blocks: int
    periods: tuple[PartitionPeriod, ...]
    windows: tuple[StepWindow, ...]


def read_history(events: Sequence[Event]) -> PipelineHistory:
    """Read periods and windows from an event log.

    Raises:
        UsageError: It has no events of an adapting pipeline.
    """
    windows = [event for event in events if event["kind"] == "pipeline_measured"]
    if not windows:
        do = "Let a pipeline adapt: `ringweave.pipeline.adapting.adapt(pipeline, make_optimizer)`"
        expected = "events of kind pipeline_measured"
        raise UsageError("events of a pipeline", got="none", expected=expected, do=do)
    moves = [event for event in events if event["kind"] == "blocks_moved"]
    edges = [windows[0]["first_step"], *(event["at_step"] for event in moves), windows[-1]["end_step"]]
    splits = [tuple(event["before"]) for event in moves[:1]] + [tuple(event["after"]) for event in moves]
    splits = splits or [tuple(windows[0]["splits"])]
    periods = (
        PartitionPeriod(begin_step=begin, end_step=max(begin, end), splits=each)
        for begin, end, each in zip(edges[:-1], edges[1:], splits, strict=True)
    )
    step_windows = (
        StepWindow(
            begin_step=event["first_step"],
            end_step=event["end_step"],
            measured_s=event["measured_s"],
            predicted_s=event["predicted_s"],
        )
        for event in windows
    )
    return PipelineHistory(num_blocks=windows[0]["blocks"], periods=tuple(periods), windows=tuple(step_windows))


def draw_history(found: PipelineHistory, path: Path) -> None:
    """Plot the blocks of each device over train steps (above) and the step's time, predicted and measured (below)."""
    figure, axes = figures.new_figure(9.0, 6.0, nrows=2, sharex=True, height_ratios=(3, 2))
    figure.get_layout_engine().set(hspace=0.1)
    _draw_stages(axes[0], found)
    _draw_times(axes[1], found)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        for era in found.periods[1:]:
            axis.axvline(era.begin_step, color=figures.GREY, linewidth=0.8, linestyle=":")
    figures.save_figure(figure, path)


def _draw_stages(axis: Any, found: PipelineHistory) -> None:
    for era in found.periods:
        edges = (0, *era.splits, found.num_blocks)
        width = era.end_step - era.begin_step
        for device, (low, high) in enumerate(itertools.pairwise(edges)):
            label = f"device {device + 1}" if era is found.periods[0] else None
            colour = figures.DEVICE_COLOURS[device % len(figures.DEVICE_COLOURS)]
            at = era.begin_step
            axis.bar(at, high - low, width, bottom=low, align="edge", color=colour, label=label, edgecolor="white")
    axis.set_ylabel("blocks")
    axis.set_ylim(0, found.num_blocks)
    axis.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(figures.DEVICE_COLOURS))


def _draw_times(axis: Any, found: PipelineHistory) -> None:
    for name, colour in (("measured", figures.DARK), ("predicted", figures.ALARM)):
        for span in found.windows:
            label = f"{name} step" if span is found.windows[0] else None
            seconds = span.measured_s if name == "measured" else span.predicted_s
            style = "-" if name == "measured" else "--"
            axis.plot([span.begin_step, span.end_step], [seconds, seconds], style, color=colour, label=label)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("train step")
    axis.set_ylabel("step (s), medians")
    axis.legend(frameon=False, fontsize=8)
