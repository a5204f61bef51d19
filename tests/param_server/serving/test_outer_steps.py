"""Outer steps of sites on the server: one fragment at a time, with the optimizer of mode local."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from torch import nn

from ringweave.errors import DeadlineError, TrainingError
from ringweave.param_server import flat, snapshots
from ringweave.param_server import job as param_server_job
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import (
    ParameterGroup,
    PauseRing,
    Pull,
    Push,
    RingAssignmentRequest,
    ServerSetup,
    StartJob,
)
from ringweave.param_server.service import ParameterService, fit_snapshot
from ringweave.training import Local
from ringweave.training.options import Script
from ringweave.training.outer_optimizer import OuterOptimizer
from tests.param_server.serving.two_rings import Job

SETTINGS = Local(inner_steps=4, wire="exact")
NUM_FRAGMENTS = 4


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 2)).double()


def setup_of(model: nn.Module, num_sites: int = 2) -> ServerSetup:
    parameters = list(model.parameters())
    places = sites_of(parameters)
    options = {"lr": SETTINGS.outer_lr, "momentum": SETTINGS.outer_momentum, "nesterov": True}
    return ServerSetup(
        tensors=flat.tensor_specs([(str(index), each) for index, each in enumerate(parameters)]),
        optimizer="SGD",
        groups=[ParameterGroup(parameters=list(range(len(parameters))), options=options)],
        rings=[[site] for site in range(num_sites)],
        overlaps=True,
        compensation=0.0,
        shares=[[1]] * num_sites,
        fragments=[list(each) for each in places],
    )


def sites_of(parameters: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """The fragments of the fixed path."""
    model = nn.ParameterList([nn.Parameter(each.detach()) for each in parameters])
    return OuterOptimizer(model, SETTINGS, NUM_FRAGMENTS).fragments


class Sites(Job):
    """A server whose rings push fragments of outer gradients, called in this thread."""

    def __init__(self, num_sites: int = 2) -> None:
        super().__init__()
        self.model = make_model()
        self.setup = setup_of(self.model, num_sites)
        self.sequences, self.grants = [0] * num_sites, [0] * num_sites
        self._bases: list[list[int]] = [[] for _ in range(num_sites)]

    def begin(self) -> None:
        first = flat.tensors_of_setup(self.setup)
        torch._foreach_copy_(first.views, [each.detach() for each in self.model.parameters()])
        self.call("0.0", StartJob(term=0, setup=self.setup), first.buffers())
        for site in range(len(self.sequences)):
            self.pull_all(site)

    def pull_all(self, site: int) -> None:
        self._bases[site] = [self.call(f"{site}.0", self.pull_of(site)).version] * 2

    def pull_of(self, site: int, fragments: Sequence[int] = ()) -> Pull:
        return Pull(term=0, ring=site, after_sequence=self.sequences[site], fragments=list(fragments))

    def push_fragments(self, site: int, values: Sequence[torch.Tensor], fragments: Sequence[int], **more: Any) -> None:
        """Push an outer gradient, (all parameters,), of these fragments; empty: all."""
        self.sequences[site] += 1
        content = flat.tensors_of_setup(self.setup)
        torch._foreach_copy_(content.views, list(values))
        push = Push(
            term=0,
            ring=site,
            sequence=self.sequences[site],
            base_version=self._bases[site].pop(0),
            **{
                "content": "outer_gradient",
                "fragments": list(fragments),
                "weight": 0.5,
                "num_samples": 1,
                "batch_share": 0.5,
                **more,
            },
        )
        self.call(f"{site}.0", push, content.buffers(fragments))

    def pull_fragments(self, site: int, fragments: Sequence[int], limit_s: float = 60.0) -> None:
        answer = self.call(f"{site}.0", self.pull_of(site, fragments), limit_s=limit_s)
        self._bases[site].append(answer.version)

    def values(self) -> list[torch.Tensor]:
        """The newest parameters."""
        assert self.service.job is not None
        found = flat.tensors_of_setup(self.setup)
        self.service.job.model.read_parameters(found)
        return [each.clone() for each in found.views]


def gradients_of(number: int, model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in model.parameters()]


def run_rounds(sites: Sites, first: int, num: int) -> None:
    """Rounds of both sites, each of the next fragment."""
    for number in range(first, first + num):
        fragments = [number % NUM_FRAGMENTS]
        for site in range(2):
            sites.push_fragments(site, gradients_of(2 * number + site, sites.model), fragments)
        for site in range(2):
            sites.pull_fragments(site, fragments)


def test_outer_steps_are_those_of_sites_with_a_fixed_membership():
    """Three cycles and a half, so that momentum counts; at the end all fragments at once, as before a barrier."""
    sites, fixed = Sites(), make_model()
    sites.begin()
    outer = OuterOptimizer(fixed, SETTINGS, NUM_FRAGMENTS)
    outer.take_parameters_once()
    num_rounds = 3 * NUM_FRAGMENTS + 2
    run_rounds(sites, 0, num_rounds)
    for site in range(2):
        sites.push_fragments(site, gradients_of(2 * num_rounds + site, fixed), [], num_samples=0, batch_share=0.0)
    for number in range(num_rounds + 1):
        fragments = [number % NUM_FRAGMENTS] if number < num_rounds else range(NUM_FRAGMENTS)
        running = outer.begin_step(fragments)
        every = [gradients_of(2 * number + site, fixed) for site in range(2)]
        running.mean = torch.cat([(every[0][at] + every[1][at]).flatten() / 2 for at in running.places])
        outer.apply_step(running)
    for own, expected in zip(sites.values(), fixed.parameters(), strict=True):
        torch.testing.assert_close(own, expected.detach(), rtol=1e-12, atol=1e-12)
    assert sites.service.job is not None
    assert sites.service.job.model.progress.total == num_rounds, "train steps, by the samples that were pushed"


def test_a_fragment_waits_for_the_site_that_pushes_it_next_and_for_no_lost_one():
    sites = Sites(3)
    sites.begin()
    gradients = gradients_of(0, sites.model)
    for number in range(2):
        for site in range(3):
            sites.push_fragments(site, gradients, [number], weight=1 / 3)
        for site in range(3):
            sites.pull_fragments(site, [number])
    for site in (1, 2):
        sites.push_fragments(site, gradients, [2], weight=1 / 3)
    with pytest.raises(DeadlineError, match="parameters for ring 1"):
        sites.pull_fragments(1, [2], limit_s=0.0)
    sites.call("0.0", PauseRing(term=0, ring=0))
    sites.pull_fragments(1, [2])
    waiting = threading.Thread(target=sites.pull_fragments, args=(2, [2]))
    waiting.start()
    sites.push_fragments(0, gradients, [2], weight=1 / 3)
    sites.pull_fragments(0, [2])
    waiting.join(60.0)
    assert not waiting.is_alive()


def sites_with_one_paused() -> tuple[Sites, list[torch.Tensor]]:
    """Sites after three rounds, the second one of which has paused, and an outer gradient."""
    sites = Sites()
    sites.begin()
    run_rounds(sites, 0, 3)
    sites.call("1.0", PauseRing(term=0, ring=1))
    return sites, gradients_of(0, sites.model)


def go_on_alone(sites: Sites, site: int, gradients: list[torch.Tensor], numbers: Iterable[int]) -> None:
    """Let a site push the fragments with these numbers, and pull each."""
    for number in numbers:
        sites.push_fragments(site, gradients, [number % NUM_FRAGMENTS])
        sites.pull_fragments(site, [number % NUM_FRAGMENTS])


def test_a_site_that_was_paused_catches_up_with_the_one_that_went_on():
    """It waits for none; the other one waits for it, until both push the same fragment next again."""
    sites, gradients = sites_with_one_paused()
    go_on_alone(sites, 0, gradients, (3, 4, 5))
    sites.push_fragments(1, gradients, [3])
    sites.pull_fragments(1, [3])
    sites.push_fragments(0, gradients, [6 % NUM_FRAGMENTS])
    with pytest.raises(DeadlineError, match="parameters for ring 0"):
        sites.pull_fragments(0, [2], limit_s=0.0)
    go_on_alone(sites, 1, gradients, (4, 5, 6))
    sites.pull_fragments(0, [2])
    assert sites.service.job is not None
    assert sites.service.job.positions == {0: 7, 1: 7}


def test_for_a_site_that_was_paused_for_long_no_other_waits_longer_than_a_cycle():
    sites, gradients = sites_with_one_paused()
    go_on_alone(sites, 0, gradients, range(3, 3 + 5 * NUM_FRAGMENTS))
    assert sites.service.job is not None
    assert sites.service.job.positions == {0: 23, 1: 3}
    sites.push_fragments(1, gradients, [3])
    assert sites.service.job.positions == {0: 23, 1: 24}, "of a later cycle"


def test_a_server_that_takes_over_learns_the_positions_from_the_next_pushes():
    sites = Sites()
    sites.begin()
    run_rounds(sites, 0, 5)
    assert sites.service.job is not None
    sites.service.job.positions.clear()
    run_rounds(sites, 5, 2)
    assert sites.service.job.positions == {0: 3, 1: 3}, "alike, and at the fragment that comes next"


def test_a_snapshot_in_the_middle_of_a_cycle_goes_on_with_the_same_bits(tmp_path: Path):
    """With momentum, and with an outer step of which one site's part is missing."""
    whole, halves = Sites(), Sites()
    for each in (whole, halves):
        each.begin()
        run_rounds(each, 0, NUM_FRAGMENTS + 2)
    gradients = gradients_of(99, whole.model)
    for each in (whole, halves):
        each.push_fragments(0, gradients, [2])
    halves.service.save_snapshot(tmp_path / "kept")
    resumed = ParameterService()
    resumed.resume(snapshots.load_snapshot(tmp_path / "kept"))
    assert resumed.job is not None
    assert whole.service.job is not None
    for job in (whole.service.job, resumed.job):
        for number in range(2, 3 * NUM_FRAGMENTS):
            content = FlatTensors(
                [whole.setup.tensors[place] for place in whole.setup.fragments[number % NUM_FRAGMENTS]]
            )
            for piece in content.pieces:
                piece.fill_(float(number))
            job.model.apply_outer_gradient([(number % NUM_FRAGMENTS, content)], 0.5, 0.5)
    found, expected = flat.tensors_of_setup(whole.setup), flat.tensors_of_setup(whole.setup)
    resumed.job.model.read_parameters(found)
    whole.service.job.model.read_parameters(expected)
    assert all(torch.equal(one, other) for one, other in zip(found.views, expected.views, strict=True))


def test_a_lost_site_keeps_no_outer_step_from_being_done():
    """The other one's pushes fill outer steps alone: as many samples, so as many steps."""
    sites = Sites()
    sites.begin()
    run_rounds(sites, 0, NUM_FRAGMENTS)
    sites.abort("1.0")
    for number in range(2 * NUM_FRAGMENTS):
        sites.push_fragments(0, gradients_of(number, sites.model), [number % NUM_FRAGMENTS])
        sites.pull_fragments(0, [number % NUM_FRAGMENTS])
    assert sites.service.job is not None
    assert [each.num_finished for each in sites.service.job.model.outer_progress] == [2] * NUM_FRAGMENTS
    assert all(each.length == 0 for each in sites.service.job.model.outer_progress)


def test_a_site_that_begins_again_is_told_what_the_others_push_next():
    sites = Sites()
    sites.begin()
    run_rounds(sites, 0, 3)
    sites.abort("1.0")
    reply = sites.call("1.1", RingAssignmentRequest(term=0, slot=1, begins=True))
    assert (reply.next_fragment, reply.num_pushed) == (3, 3)


@pytest.mark.parametrize("num_fragments", [0, 2])
def test_a_checkpoint_fits_sites_with_other_fragments_or_a_single_one(num_fragments: int):
    """Its parameters are the newest, with the part of an outer step that one site had pushed."""
    sites = Sites()
    sites.begin()
    run_rounds(sites, 0, NUM_FRAGMENTS + 2)
    sites.push_fragments(0, gradients_of(99, sites.model), [2])
    expected = sites.values()
    assert sites.service.job is not None
    snapshot = param_server_job.take_job_snapshot(sites.service.job)
    options = sites.setup.groups[0].options if num_fragments else {"lr": 0.1}
    update = {
        "rings": [[0]],
        "optimizer": "SGD" if num_fragments else "AdamW",
        "groups": [ParameterGroup(parameters=list(range(len(expected))), options=options)],
        "fragments": [[0, 1, 2], [3, 4, 5]][:num_fragments],
    }
    setup = sites.setup.model_copy(update=update)
    model = snapshots.restore_model(fit_snapshot(snapshot, setup))
    found = flat.tensors_of_setup(setup)
    model.read_parameters(found)
    assert all(torch.equal(one, other) for one, other in zip(found.views, expected, strict=True))
    assert bool(model.optimizer.state) == bool(num_fragments), "momentum stays"
    assert model.progress.total == snapshot.progress.total > 0


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"content": "change"}, r"content of a push: 'change', expected that of the job"),
        ({"content": "gradient", "options": []}, r"content of a push: 'gradient', expected that of the job"),
    ],
)
def test_other_content_is_refused(more: dict[str, Any], text: str):
    sites = Sites()
    sites.begin()
    with pytest.raises(TrainingError, match=text):
        sites.push_fragments(0, gradients_of(0, sites.model), [], **more)


def test_fragments_that_a_job_lacks_are_refused():
    sites = Sites()
    sites.begin()
    with pytest.raises(TrainingError, match=r"fragments: \[4\], expected those below 4, each once\. Run the same"):
        sites.call("0.0", sites.pull_of(0, [4]))
    assert sites.service.job is not None
    with pytest.raises(TrainingError, match=r"bytes of a push: \[8\]"):
        sites.service.push_buffers(sites.service.job, _push([1]), [8])
    for fragments in ([9], [1, 1]):
        with pytest.raises(TrainingError, match=rf"fragments: \[{fragments[0]}"):
            sites.service.push_buffers(sites.service.job, _push(fragments), [8])


def test_fragments_have_each_parameter_once():
    setup = setup_of(make_model())
    with pytest.raises(pydantic.ValidationError, match="each tensor in exactly one"):
        ServerSetup.model_validate({**setup.model_dump(), "fragments": [[0, 1], [1, 2, 3, 4, 5]]})


def _push(fragments: list[int]) -> Push:
    return Push(
        term=0,
        ring=0,
        sequence=1,
        base_version=0,
        content="outer_gradient",
        fragments=fragments,
        num_samples=1,
        batch_share=0.5,
    )


def test_the_script_s_fragments_are_those_of_the_fixed_path():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    script: Any = type("S", (), {"parameters": Script.parameters.fget(type("O", (), {"optimizer": optimizer})())})()
    script.local = SETTINGS
    assert Script.fragments_between(script, 2) == sites_of(list(model.parameters()))
    assert Script.fragments_between(script, 1) == (), "one site has no outer step"
