import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import UsageError
from ringweave.planning.partition.problem import Layer, check_complete, merge_layers


def layers(*work: float) -> list[Layer]:
    return [
        Layer(name=f"l{index}", work=each, activation=10 + index, state=2, stash=1) for index, each in enumerate(work)
    ]


def ranges(blocks: tuple) -> list[tuple[int, int]]:
    return [(block.first, block.end) for block in blocks]


def test_the_least_neighbours_are_merged_the_first_of_equals() -> None:
    assert ranges(merge_layers(layers(5, 1, 1, 5, 1, 1), 5)) == [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    assert ranges(merge_layers(layers(5, 1, 1, 5, 1, 1), 4)) == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert ranges(merge_layers(layers(1, 1), 5)) == [(0, 1), (1, 2)]


def test_sums_and_the_last_layers_activation() -> None:
    (block,) = merge_layers(layers(1, 2, 3), 1)
    assert (block.work, block.activation, block.state, block.stash) == (6, 12, 6, 3)


def test_layers_that_stay_together() -> None:
    assert ranges(merge_layers(layers(1, 9, 9, 1), 4, joined={1})) == [(0, 1), (1, 3), (3, 4)]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30), st.integers(1, 12), st.data())
def test_no_layer_is_dropped(work: list[float], max_blocks: int, data: st.DataObject) -> None:
    model = layers(*work)
    joined = data.draw(st.sets(st.integers(0, len(work) - 2))) if len(work) > 1 else set()
    blocks = merge_layers(model, max_blocks, joined)
    names = [layer.name for layer in model]
    check_complete(names, [names[block.first : block.end] for block in blocks])
    assert len(blocks) <= max_blocks
    assert not {block.end - 1 for block in blocks[:-1]} & joined
    assert sum(block.work for block in blocks) == pytest.approx(sum(work))


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ([["a"], ["b"]], "layers in all blocks: 2, expected 3, as the model has; look at c. Build the blocks from"),
        ([["a", "b"], ["b", "c"]], "layers in all blocks: 4, expected 3, as the model has; look at b."),
        ([["a", "c"], ["b"]], "layer 2 of all blocks: 'c', expected 'b', as in the model."),
    ],
)
def test_parts_that_are_not_the_model(held: list[list[str]], text: str) -> None:
    with pytest.raises(UsageError) as error:
        check_complete(["a", "b", "c"], held)
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], 1), "layers: 0, expected 1 or more. Give the model's layers in their order."),
        ((layers(1), 0), "blocks: 0, expected 1 or more. Say how many at most."),
        (([*layers(1), *layers(1)], 2), "name of a layer: 'l0', expected a name of its own. Rename one of the two."),
        ((layers(1, 1), 2, [1]), "joined layer: 1, expected the index of a layer that has one after it, 0 to 0. Leave"),
    ],
)
def test_wrong_questions(arguments: tuple, text: str) -> None:
    with pytest.raises(UsageError) as error:
        merge_layers(*arguments)
    assert str(error.value).startswith(text)
