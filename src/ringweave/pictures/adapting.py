"""A pipeline that adapts: which device had which blocks over its train steps, and what steps were to take and took."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringweave.errors import UsageError, explain
from ringweave.pictures import plotting

_COLOURS = ("#30638e", "#d1495b", "#5f9e6e", "#c8a13a", "#7d5ba6", "#8d99ae", "#e08e45", "#3d7068")
_MEASURED, _PREDICTED, _MOVED = "#2b2d42", "#d1495b", "#8d99ae"

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Era:
    """Train steps under one partition."""

    begin_step: int
    end_step: int
    splits: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A window of train steps."""

    begin_step: int
    end_step: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What the event log tells of one pipeline."""

    num_blocks: int
    eras: tuple[Era, ...]
    spans: tuple[Span, ...]


def history(events: Sequence[Event]) -> History:
    """Eras and windows of an event log.

    Raises:
        UsageError: Nothing of an adapting pipeline is in it.
    """
    windows = [event for event in events if event["kind"] == "pipeline_measured"]
    if not windows:
        do = "Let a pipeline adapt: `ringweave.pipeline.adapting.adapt(pipeline, make_optimizer)`"
        expected = "events of kind pipeline_measured"
        raise UsageError(explain("events of a pipeline", got="none", expected=expected, do=do))
    moves = [event for event in events if event["kind"] == "blocks_moved"]
    edges = [windows[0]["first_step"], *(event["at_step"] for event in moves), windows[-1]["end_step"]]
    splits = [tuple(event["before"]) for event in moves[:1]] + [tuple(event["after"]) for event in moves]
    splits = splits or [tuple(windows[0]["splits"])]
    eras = (
        Era(begin_step=begin, end_step=max(begin, end), splits=each)
        for begin, end, each in zip(edges[:-1], edges[1:], splits, strict=True)
    )
    spans = (
        Span(
            begin_step=event["first_step"],
            end_step=event["end_step"],
            measured_s=event["measured_s"],
            predicted_s=event["predicted_s"],
        )
        for event in windows
    )
    return History(num_blocks=windows[0]["blocks"], eras=tuple(eras), spans=tuple(spans))


def draw(found: History, path: Path) -> None:
    """Above the blocks of each device over the steps, below the step's time, predicted and measured."""
    figure, axes = plotting.new_figure(9.0, 6.0, nrows=2, sharex=True, height_ratios=(3, 2))
    _draw_stages(axes[0], found)
    _draw_times(axes[1], found)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        for era in found.eras[1:]:
            axis.axvline(era.begin_step, color=_MOVED, linewidth=0.8, linestyle=":")
    plotting.save(figure, path)


def _draw_stages(axis: Any, found: History) -> None:
    for era in found.eras:
        edges = (0, *era.splits, found.num_blocks)
        width = era.end_step - era.begin_step
        for device, (low, high) in enumerate(itertools.pairwise(edges)):
            label = f"device {device + 1}" if era is found.eras[0] else None
            colour = _COLOURS[device % len(_COLOURS)]
            at = era.begin_step
            axis.bar(at, high - low, width, bottom=low, align="edge", color=colour, label=label, edgecolor="white")
    axis.set_ylabel("blocks")
    axis.set_ylim(0, found.num_blocks)
    axis.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(_COLOURS))


def _draw_times(axis: Any, found: History) -> None:
    for name, colour in (("measured", _MEASURED), ("predicted", _PREDICTED)):
        for span in found.spans:
            label = f"{name} step" if span is found.spans[0] else None
            seconds = span.measured_s if name == "measured" else span.predicted_s
            style = "-" if name == "measured" else "--"
            axis.plot([span.begin_step, span.end_step], [seconds, seconds], style, color=colour, label=label)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("train step")
    axis.set_ylabel("seconds of a step, median of a window")
    axis.legend(frameon=False, fontsize=8)
