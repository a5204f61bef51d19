"""How many steps each ring computes on its own before it pushes: fewer in slow rings, so that all push equally often.

Source: dynamic local updates (DyLU) of Liu et al., "Asynchronous Local-SGD Training for Language Modeling" (2024).
"""

from collections.abc import Sequence

from ringweave.errors import TrainingError, explain


def by_speed(most_steps: int, steps_per_s: Sequence[float]) -> tuple[int, ...]:
    """Local steps of each ring: `most_steps` for the fastest, the others in proportion, at least one each.

    Raises:
        TrainingError: A number that is not positive.
    """
    if most_steps < 1 or not steps_per_s or not all(each > 0 for each in steps_per_s):
        raise TrainingError(
            explain(
                "local steps",
                got=(most_steps, list(steps_per_s)),
                expected="at least one step, and a positive speed of each ring",
                do="Set local_steps to 1 to push every step",
            )
        )
    fastest = max(steps_per_s)
    return tuple(max(1, round(most_steps * each / fastest)) for each in steps_per_s)
