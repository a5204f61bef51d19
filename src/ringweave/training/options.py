"""Script: model, optimizer and data that a script gives `prepare`, with its options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave.environment import EXACT
from ringweave.errors import TrainingError
from ringweave.planning import sites
from ringweave.planning.sites import MAX_INNER_STEPS
from ringweave.training import speed_test
from ringweave.training.data.order import LoaderSpec
from ringweave.training.data.shared_loader import SampleWeightTable
from ringweave.training.outer_formats import FORMATS, OuterFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Asynchronous:
    """Settings of asynchronous training in rings, for modes `ps-hra` and `ps`."""

    rings: int | None = None
    """Number of rings; None means one per kind of workers, at least two. Mode `ps` ignores it."""
    local_steps: int = 0
    """Local steps of each ring from one push to the next, with the script's optimizer; the push runs meanwhile. Slow
    rings take as many steps, with fewer samples. 0 pushes the gradients of every step, and waits."""
    compensation: float = 0.0
    """Lambda of delay compensation, g + lambda g g (theta_now - theta_base). It costs the server a copy of the
    parameters for each ring, and changed no loss that was measured; its authors use 0.04."""

    speed_test_s: float = speed_test.START_TIMEOUT_S
    """Seconds that the speed test at the start waits for the last worker, before it fails with an error that names it.
    """

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.rings is not None and self.rings < 1:
            do = "Leave it out for one of each kind of workers"
            raise TrainingError("rings", got=self.rings, expected="1 or more", do=do)
        if self.local_steps < 0:
            raise TrainingError(
                "local_steps", got=self.local_steps, expected="0 or more", do="Leave it out to push every step"
            )
        if not self.speed_test_s > 0:
            do = f"Leave it out for {speed_test.START_TIMEOUT_S:g} s"
            raise TrainingError("speed_test_s", got=self.speed_test_s, expected="more than 0 seconds", do=do)


ELASTIC_INNER_STEPS = 64
"""Inner steps of mode local in an elastic job until its first exchange, if none are set: exchanges are exact, so they
are to be rare."""
ELASTIC_SITES = "in an elastic job sites exchange exact outer gradients through a parameter server"


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """Settings of low-communication training, for mode `local`: Streaming DiLoCo (arXiv 2501.18512)."""

    inner_steps: int | None = None
    """Train steps in which each parameter gets one outer step; a slower site does fewer inner steps in that time, a
    faster one more. None derives them from measured times, again after each outer step: the fewest with which an
    exchange ends in the time of its round."""
    max_inner_steps: int = MAX_INNER_STEPS
    """Upper limit of derived inner steps."""
    fragments: int = 4
    """Parts of the parameters, which are exchanged one after the other; at most `inner_steps`."""
    wire: str = "int4"
    """Format of outer gradients between sites: exact, bf16, int8, int4, int2 or top-k (a 64th of the values, in 2
    bits). What a format leaves out goes with a later outer step (error feedback)."""
    computing_share: float = 0.97
    """Least share of the time that is spent computing, if `inner_steps` is derived; the rest goes to outer steps."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer. With 1 and no momentum an outer step is the mean of the sites' parameters.
    """
    outer_momentum: float = 0.3
    """Nesterov momentum of the outer optimizer; 0 to below 1. With 0.7 and 0.3 outer steps add up to the mean of the
    sites. DiLoCo's 0.9 overshoots in a training of some hundred steps, by 11 % of the loss
    (docs/decisions/0043-low-communication-training.md)."""
    inner_lr_factor: float | None = None
    """Factor of the script's learning rates in steps of a site, whose batch is a part of the script's. None: the square
    root of the number of sites for an optimizer that divides by the size of gradients, such as Adam, and 1 for others
    (arXiv 2205.10287; measured in docs/notebook/2026-11.md)."""
    sites: Sequence[Sequence[int]] | None = None
    """Ranks of each site; None means those of the cluster file, and without one those of measured links: nodes with at
    least four times the rate between them that they have to others. If nothing tells nodes apart, each is a site."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        is_count, is_number = _is_count, _is_number
        rules = [
            ("inner_steps", self.inner_steps is None or is_count(self.inner_steps), "1 or more", "to derive it"),
            ("max_inner_steps", is_count(self.max_inner_steps), "1 or more", f"for {MAX_INNER_STEPS}"),
            ("fragments", is_count(self.fragments), "1 or more", "for 4"),
            ("wire", self.wire in FORMATS, f"one of {', '.join(FORMATS)}", "for int4"),
            (
                "computing_share",
                is_number(self.computing_share) and 0 < self.computing_share < 1,
                "between 0 and 1",
                "for 0.97",
            ),
            ("outer_lr", is_number(self.outer_lr) and self.outer_lr > 0, "more than 0", "for 0.7"),
            (
                "outer_momentum",
                is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1,
                "0 to below 1",
                "for 0.3",
            ),
            (
                "inner_lr_factor",
                self.inner_lr_factor is None or (is_number(self.inner_lr_factor) and self.inner_lr_factor > 0),
                "more than 0",
                "to derive it",
            ),
        ]
        for name, is_valid, expected, do in rules:
            if not is_valid:
                raise TrainingError(name, got=getattr(self, name), expected=expected, do=f"Leave it out {do}")

    def as_asynchronous(self) -> Asynchronous:
        """Return settings with which sites that come and go exchange through a parameter server, as rings do."""
        return Asynchronous(local_steps=-(-self.elastic_inner_steps // self.elastic_fragments))

    @property
    def elastic_inner_steps(self) -> int:
        """Inner steps in which each parameter gets one outer step at first, in an elastic job."""
        return self.inner_steps or ELASTIC_INNER_STEPS

    @property
    def elastic_fragments(self) -> int:
        """Fragments of the parameters in an elastic job."""
        return min(self.fragments, self.elastic_inner_steps)

    @property
    def format(self) -> OuterFormat:
        return FORMATS[self.wire]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


REDUCTIONS = ("mean", "sum")
ON_FAILURE = ("recompute", "drop")


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Objects and options that a script gives `prepare`; the options are described there."""

    model: nn.Module
    optimizer: Optimizer
    loader: DataLoader
    spec: LoaderSpec
    seed: int
    """Seed of the orders of all epochs."""
    mode: str
    reduction: str
    max_samples: int | None
    ddp: dict[str, Any]
    settings: Asynchronous
    extra_state: Mapping[str, Any]
    on_failure: str
    local: Local = field(default_factory=Local)
    weight: SampleWeightTable | Callable[[Any], float] | None = None
    """Weights of the samples, or the script's function of a batch."""
    wire: str = EXACT
    """Wire format of the gradients."""
    max_loss_increase: float | None = None
    """Loss at equal samples that `auto` may give up for speed, as a fraction; None: none."""
    is_wire_open: bool = False
    """Neither script nor launcher names a wire format."""

    @property
    def is_mean(self) -> bool:
        return self.reduction == "mean"

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters of the optimizer, in its order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def fragments_between(self, num_sites: int) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the parameters of each fragment of an elastic job in mode local; none for one site."""
        sizes = [each.numel() for each in self.parameters]
        return sites.divide_into_fragments(sizes, self.local.elastic_fragments) if num_sites > 1 else ()

    @property
    def sample_weights(self) -> SampleWeightTable | None:
        """Weights of the samples, where a rank's weight of a batch cannot be exchanged.

        Raises:
            TrainingError: The script gives a function of a batch, or drops samples of lost workers.
        """
        if self.weight is not None and self.on_failure == "drop":
            do = "Leave out on_failure: with samples of unequal weights, a step that drops some has no exact mean"
            raise TrainingError("on_failure", got="drop", expected="recompute beside weight", do=do)
        if self.weight is None or isinstance(self.weight, SampleWeightTable):
            return self.weight
        what, got = "weight", "a function of a batch"
        do = "Give the number of tokens, or the weight, of each sample, so that all workers know that of a whole batch"
        expected = "one number for each sample under --elastic and in modes with a parameter server"
        raise TrainingError(what, got=got, expected=expected, do=do)

    @property
    def weight_digest(self) -> str:
        """Text that is the same where the weights are; empty without weights."""
        if self.weight is None:
            return ""
        return self.weight.digest if isinstance(self.weight, SampleWeightTable) else "a function of a batch"

    def elastic_must_match(self, mode: str) -> dict[str, Any]:
        """Return the values that must be the same on all members of an elastic job."""
        return {
            **asdict(self.spec),
            "mode": mode,
            "reduction": self.reduction,
            "seed": self.seed,
            "num_parameters": sum(1 for _ in self.model.parameters()),  # all that are in DDP's map of used parameters
            "on_failure": self.on_failure,
            "weight": self.weight_digest,
            "wire": self.wire,
            "max_loss_increase": self.max_loss_increase,
        }


def check_options(reduction: str, on_failure: str, *, is_weighted: bool) -> None:
    """Refuse invalid options of `prepare`.

    Raises:
        TrainingError: For the first one.
    """
    if reduction not in REDUCTIONS:
        do = "Say how the loss of a batch follows from the losses of its samples"
        raise TrainingError("reduction", got=reduction, expected="mean or sum", do=do)
    if on_failure not in ON_FAILURE:
        do = "Say what happens to the samples of a worker that is lost within a train step"
        raise TrainingError("on_failure", got=on_failure, expected="recompute or drop", do=do)
    if is_weighted and reduction != "mean":
        do = "Leave out weight: a sum of losses needs none"
        raise TrainingError("reduction", got=reduction, expected="mean beside weight", do=do)
