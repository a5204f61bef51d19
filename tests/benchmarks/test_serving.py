"""The arithmetic that makes every message checkable, as the workers have it."""

import importlib.util
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave_bench.systems import PROGRAMS_FOLDER


@pytest.fixture(scope="module")
def serving():
    """The module that workers find beside their program."""
    spec = importlib.util.spec_from_file_location("serving_under_test", PROGRAMS_FOLDER / "serving.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def inputs_of(serving, num_elements: int, world_size: int, round_index: int, call: int) -> list[np.ndarray]:
    arrays = [np.empty(num_elements, np.float32) for _ in range(world_size)]
    for rank, array in enumerate(arrays):
        serving.RankInputs(num_elements, rank, world_size).fill(array, round_index, call)
    return arrays


@given(st.integers(1, 600), st.integers(1, 9), st.integers(0, 1000), st.integers(0, 19), st.randoms())
def test_the_sum_is_exact_in_any_order(serving, num_elements, world_size, round_index, call, random) -> None:
    arrays = inputs_of(serving, num_elements, world_size, round_index, call)
    random.shuffle(arrays)
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    checker = serving.RankInputs(num_elements, 0, world_size)
    assert checker.first_wrong("allreduce", total, round_index, call) is None


@pytest.mark.parametrize("what", ["one element", "a rank twice", "a chunk moved", "the round before", "not a number"])
def test_a_wrong_sum_is_found(serving, what: str) -> None:
    arrays = inputs_of(serving, 1000, 4, 5, 2)
    total = np.sum(arrays, axis=0, dtype=np.float32)
    checker = serving.RankInputs(1000, 1, 4)
    assert checker.first_wrong("allreduce", total, 5, 2) is None
    match what:
        case "one element":
            total[7] += 1
        case "a rank twice":
            total += arrays[2] - arrays[3]
        case "a chunk moved":
            total[250:500] = total[:250].copy()
        case "the round before":
            total = np.sum(inputs_of(serving, 1000, 4, 4, 2), axis=0, dtype=np.float32)
        case "not a number":
            total[999] = np.nan
    found = checker.first_wrong("allreduce", total, 5, 2)
    assert found is not None
    assert found["num_wrong"] == {"one element": 1, "not a number": 1}.get(what, found["num_wrong"])
    assert found["got"] != found["expected"]


@pytest.mark.parametrize("kind", ["reduce-scatter", "allgather", "broadcast"])
def test_results_of_other_collectives_are_checked_on_every_rank(serving, kind: str) -> None:
    """A result with one changed element, and one of another round, are found."""
    size, block = 4, 300
    whole = size * block
    given_elements = block if kind == "allgather" else whole
    arrays = inputs_of(serving, given_elements, size, 5, 2)
    total = np.sum(arrays, axis=0, dtype=np.float32)
    for rank in range(size):
        right = {
            "reduce-scatter": total[rank * block : (rank + 1) * block],
            "allgather": np.concatenate(arrays)[:whole],
            "broadcast": arrays[0],
        }[kind].copy()
        checker = serving.RankInputs(whole, rank, size)
        assert checker.first_wrong(kind, right, 5, 2) is None
        assert checker.first_wrong(kind, right, 4, 2) is not None
        right[block - 1] += 1
        assert checker.first_wrong(kind, right, 5, 2)["element"] == block - 1
