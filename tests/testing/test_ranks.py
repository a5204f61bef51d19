import time

import pytest

from ringweave.testing.ranks import Ranks


@pytest.mark.slow
@pytest.mark.distributed
def test_of_a_rank_that_does_not_end_it_is_said_what_it_does() -> None:
    with Ranks(time.sleep, 1, 10_000, backend="gloo") as ranks:
        ranks.wait_for("ranks/all-formed")
        with pytest.raises(TimeoutError, match=r"(?s)^rank 0 has not ended in time; .*ranks\.py.* in _main"):
            ranks.outcomes(timeout_s=0.0)
