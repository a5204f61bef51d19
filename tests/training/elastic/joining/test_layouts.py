import random

from ringweave import wire
from ringweave.membership.messages import Stand, Told
from ringweave.membership.rules.records import Decree, Order, Standing
from ringweave.training.elastic.joining import layouts


def test_a_layout_comes_back_as_it_was() -> None:
    for layout in ([], [[3, "float32", "cpu"], [2, "bfloat16", "cuda"]]):
        assert layouts.of_text(layouts.to_text(layout)) == layout
    assert layouts.to_text([]) == "", "which is told from one that there is"


def test_thousands_of_buckets_that_are_all_different_fit_into_what_members_say_and_hear() -> None:
    sizes = random.Random(7)
    layout = [[sizes.randrange(1, 10**8), "bfloat16", "cuda"] for _ in range(5000)]
    standing = Standing(member="0.0", has_state=True, layout=layouts.to_text(layout))
    stand = Stand(ballot=(1, 1), standing=standing)
    order = Order(ballot=(1, 1), decree=Decree(ballot=(1, 1), standings=(standing,)))
    for message in (stand, Told(serial=1, is_active=True, order=order)):
        assert len(message.model_dump_json()) < wire.Limits().max_body_bytes / 4
