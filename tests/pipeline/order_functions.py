"""Pipelines whose stages take microbatches in orders of their own, in real processes."""

from dataclasses import dataclass

import torch
from torch import nn

from ringweave.pipeline import Pipeline, Settings
from ringweave.sim.pipeline_schedules import parse_pipeline_schedule
from tests.pipeline.pipeline_functions import BATCH, FEATURES, batch_of, gradients_of, make_optimizer, plain_model


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a rank has of a batch, in float64."""

    gradients: dict[int, list[float]]
    """Of the held blocks."""
    losses: list[float]
    """Of each microbatch."""
    held_out: list[float]
    """The same in evaluation mode, of another batch."""
    output: list[float] | None
    """Of that batch, on the last stage."""


def run(text: str, splits: tuple[int, ...]) -> Found:
    """A batch by an order that is given as text."""
    order = parse_pipeline_schedule(text)
    settings = Settings(num_microbatches=order.num_microbatches, schedule=order, splits=splits)
    example = torch.empty(BATCH, FEATURES, dtype=torch.float64)
    pipeline = Pipeline(list(plain_model()), nn.CrossEntropyLoss(), make_optimizer, example, settings)
    x, y = batch_of(0)
    pipeline.forward_backward(x.double(), target=y)
    losses = pipeline.microbatch_losses.flatten().tolist()
    x, y = batch_of(1)
    pipeline.evaluate(x.double(), target=y)
    output = pipeline.output(x.double(), target=y)
    return Found(
        gradients=gradients_of(pipeline.blocks, pipeline.blocks.held),
        losses=losses,
        held_out=pipeline.microbatch_losses.flatten().tolist(),
        output=None if output is None else output.flatten().tolist(),
    )


def run_plainly(num_microbatches: int) -> Found:
    """The same by torch alone."""
    model, losses = plain_model(), []
    for index in range(2):
        x, y = batch_of(index)
        output = model(x.double())
        each = nn.functional.cross_entropy(output, y, reduction="none").reshape(num_microbatches, -1).mean(1)
        losses.append(each.tolist())
        if index == 0:
            each.mean().backward()
    gradients = gradients_of(model, range(len(model)))
    return Found(gradients=gradients, losses=losses[0], held_out=losses[1], output=output.flatten().tolist())
