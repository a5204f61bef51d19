"""Messages between stages: errors by channel, sizes, and messages that are refused."""

import random

import pytest
import torch
from torch import Tensor

from ringweave.errors import DisagreementError
from ringweave.pipeline.runtime import boundaries
from ringweave.pipeline.runtime.boundaries import Boundary, TensorMeta

SHAPES = [(8, 16, 32), (5, 3, 7, 4), (24, 16), (50,)]
HEADER_BYTES, LEVELS = 24, 255


def values_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Channels with other means and ranges."""
    generator = torch.Generator().manual_seed(seed)
    channel = shape[1] if len(shape) > 3 else shape[-1]
    as_last = torch.randn(*shape[:1], *shape[2:], channel, generator=generator) if len(shape) > 3 else None
    values = torch.randn(shape, generator=generator) if as_last is None else as_last
    values = values * torch.logspace(-3, 3, channel) + torch.linspace(-50, 50, channel)
    return values if as_last is None else values.movedim(-1, 1).contiguous()


def by_channel(values: Tensor) -> Tensor:
    """[channels, values]."""
    return (values.movedim(1, 0) if values.ndim > 3 else values.movedim(-1, 0)).flatten(1)


def sent(wire: str, values: Tensor) -> Tensor:
    received = torch.full_like(values, 7.0)
    boundaries.decode(wire, boundaries.encode(wire, values), received)
    return received


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_error_of_int8_is_half_a_scale_of_its_own_channel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for seed in range(20):
        values = values_of(shape, seed).to(dtype)
        if boundaries.format_of("int8", shape, dtype) != "int8":
            pytest.skip("two bytes a value are too few to save any")
        rows, received = by_channel(values.double()), by_channel(sent("int8", values).double())
        scale = (rows.amax(1) - rows.amin(1)) / LEVELS
        rounding = torch.finfo(dtype).eps * rows.abs().amax(1) * 2
        assert ((rows - received).abs().amax(1) <= 0.5 * scale + rounding).all()
        assert (received[:, :1] - rows[:, :1]).abs().max() > 0, "it is not exact"


def test_the_error_of_bf16_is_that_of_its_mantissa() -> None:
    values = values_of((64, 32))
    assert ((values - sent("bf16", values)).abs() <= values.abs() * 2.0**-8).all()


def test_a_channel_of_one_value_and_one_too_small_to_scale_stay() -> None:
    values = values_of((24, 16))
    values[:, 3], values[:, 4] = 2.5, 1e-40
    received = sent("int8", values)
    assert torch.equal(received[:, 3], values[:, 3])
    assert (received[:, 4] - values[:, 4]).abs().max() < 1e-37


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_channel_with_an_odd_value_is_nan_throughout_and_others_are_not(odd: float) -> None:
    values = values_of((24, 16))
    values[5, 3] = odd
    received = sent("int8", values)
    assert received[:, 3].isnan().all()
    assert received[:, :3].isfinite().all()
    assert received[:, 4:].isfinite().all()
    assert not sent("bf16", values)[5, 3].isfinite()


def test_tensors_travel_in_the_smallest_format_that_is_allowed() -> None:
    def formats(shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        return [boundaries.format_of(wire, shape, dtype) for wire in ("exact", "bf16", "int8")]

    assert formats((64, 32), torch.float32) == ["exact", "bf16", "int8"]
    assert formats((64, 32), torch.float16) == ["exact", "exact", "int8"]
    assert formats((64, 32), torch.float64) == formats((64, 32), torch.int64) == ["exact"] * 3
    assert formats((6, 16), torch.float32) == ["exact", "bf16", "bf16"], "few values share shift and scale"
    assert formats((2, 4), torch.float32) == ["exact"] * 3
    assert formats((0, 4), torch.float32) == formats((), torch.float32) == ["exact"] * 3
    exact = torch.ones(2, 4)
    assert boundaries.encode("int8", exact) is exact
    assert boundaries.empty_message("int8", exact) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_messages_have_the_bytes_that_plans_count(shape: tuple[int, ...], wire: str) -> None:
    values = values_of(shape) if len(shape) > 1 else torch.randn(shape)
    message = boundaries.encode(wire, values)
    assert message.nbytes == boundaries.message_bytes(wire, shape, torch.float32)
    form, ids = (
        TensorMeta.from_tensor(values.requires_grad_()),
        TensorMeta.from_tensor(torch.zeros(9, dtype=torch.int64)),
    )
    assert boundaries.boundary_bytes(wire, Boundary((form, ids))) == (message.nbytes + 72, message.nbytes)


def test_sizes_of_messages_by_hand() -> None:
    assert boundaries.message_bytes("int8", (8, 16, 32), torch.float32) == HEADER_BYTES + 8 * 32 + 8 * 16 * 32
    assert boundaries.message_bytes("int8", (5, 3, 7, 4), torch.float32) == HEADER_BYTES + 8 * 3 + 5 * 3 * 7 * 4
    assert boundaries.message_bytes("bf16", (24, 16), torch.float32) == HEADER_BYTES + 2 * 24 * 16
    assert boundaries.message_bytes("exact", (24, 16), torch.float32) == 4 * 24 * 16


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_mutated_messages_are_refused_by_name_and_nothing_is_written(wire: str) -> None:
    values, rng = values_of((24, 16)), random.Random(3)
    message, received = boundaries.encode(wire, values), torch.zeros(24, 16)
    names = set()
    for _ in range(4000):
        changed = message.clone()
        kind = rng.randrange(4)
        if kind == 0:
            changed = changed[: rng.randrange(len(changed))]
        elif kind == 1:
            changed = torch.cat((changed, changed[: rng.randrange(1, len(changed))]))
        else:
            places = rng.sample(range(HEADER_BYTES if kind == 2 else len(changed)), rng.randint(1, 4))
            for place in places:
                changed[place] ^= rng.randrange(1, 256)
        with pytest.raises(DisagreementError, match="message between stages") as caught:
            boundaries.decode(wire, changed, received)
        names.add(str(caught.value).split(":")[0])
    assert names == {
        "bytes of a message between stages",
        *(
            f"message between stages, {noun}"
            for noun in ("magic", "format", "values of a channel", "channels", "checksum")
        ),
    }
    assert not received.any()


def test_messages_for_another_form_are_refused() -> None:
    message = boundaries.encode("int8", values_of((24, 16)))
    with pytest.raises(DisagreementError) as caught:
        boundaries.decode("int8", message, torch.zeros(16, 24), where="stage 1, forward of microbatch 2")
    assert str(caught.value) == (
        "bytes of a message between stages: 536, expected 600 for int8 of shape (16, 24). Run the same script and "
        "version of ringweave on all ranks; if they are the same, look for a faulty link. "
        "[stage 1, forward of microbatch 2]"
    )
    same_size = boundaries.encode("bf16", values_of((16, 24)))
    with pytest.raises(DisagreementError, match="message between stages, values of a channel: 16, expected 24"):
        boundaries.decode("bf16", same_size, torch.zeros(24, 16))
    with pytest.raises(DisagreementError, match="bytes of a message between stages"):
        boundaries.decode("bf16", same_size.view(torch.int8), torch.zeros(16, 24))
