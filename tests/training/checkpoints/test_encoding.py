"""State that goes through JSON and tensors comes back as it was."""

import json
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import TrainingError
from ringweave.training.checkpoints import format
from ringweave.training.checkpoints.format import StateEncoder

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
STATES = st.recursive(
    SCALARS | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(SCALARS, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.just(())
    ),
    max_leaves=20,
)


def there_and_back(state: Any) -> Any:
    encoder = StateEncoder()
    tree = encoder.encode(state, "x")
    return format.decode_state(json.loads(json.dumps(tree)), encoder.tensors)


@given(STATES)
def test_containers_and_scalars_come_back(state: Any) -> None:
    found = there_and_back(state)
    assert found == state
    assert repr(found) == repr(state), "with the same types: True is not 1, a tuple no list"


@pytest.mark.parametrize("dtype", list(format.SAFETENSORS_DTYPES))
def test_tensors_of_all_types_keep_their_places(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    found = there_and_back({0: tensor, "0": [tensor[:, 1]], "empty": torch.empty(0, 3, dtype=dtype)})
    assert torch.equal(found[0].to(torch.complex128), tensor.to(torch.complex128))
    assert torch.equal(found["0"][0].to(torch.complex128), tensor[:, 1].to(torch.complex128))
    assert found["empty"].shape == (0, 3)


def test_numpy_and_subclasses_of_dict() -> None:
    found = there_and_back({"a": np.arange(4), "b": np.float32(0.5), "c": Counter([1]), "d": OrderedDict(x=1)})
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert (found["b"], found["c"], found["d"]) == (0.5, {1: 1}, {"x": 1})


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"f": print}, r"state of x\.f: 'builtin_function_or_method', expected numbers, text, tensors, and lists"),
        ({(1, 2): 3}, r"state of x: 'the key \(1, 2\)', expected keys that are text or numbers\. Leave it out"),
        ({"s": torch.eye(2).to_sparse()}, r"state of x\.s: 'Tensor of .*', expected a dense tensor that is whole on"),
        ({"o": np.array([None])}, r"state of x\.o: 'an array of object', expected an array of numbers\."),
        ({"q": torch.zeros(2, dtype=torch.complex128)}, r"state of x\.q: .*complex128.*, expected a dense tensor"),
    ],
)
def test_what_needs_pickle_is_refused_by_name(state: Any, text: str) -> None:
    with pytest.raises(TrainingError, match=text):
        StateEncoder().encode(state, "x")


def test_containers_without_end_are_refused() -> None:
    endless: list = []
    endless.append(endless)
    with pytest.raises(TrainingError, match=r"51 containers in each other', expected at most 50"):
        StateEncoder().encode(endless, "x")


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"map": 1},
        {"map": [[1]]},
        {"map": [[[], 1]]},
        {"tensor": "absent"},
        {"tensor": 3},
        {"list": []},
        {"bytes": "zz"},
        {"map": [], "x": 1},
    ],
)
def test_what_was_never_encoded_is_no_state(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        format.decode_state(tree, {})
