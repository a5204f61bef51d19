"""The optimizer that a script gets back where rings may lose members; see `params.ring.optimizer`."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ringweave.params.serving import optimizers
from ringweave.training.rings.elastic.member import RingMember


class KeptOptimizer(Optimizer):
    """Stands for the script's optimizer, whose groups it shares; its `step` is the ring's, its state on the server.

    With local steps the state is the script's optimizer's, on each member.
    """

    def __init__(self, optimizer: Optimizer, member: RingMember) -> None:
        """Changes nothing of the script's optimizer."""
        super().__init__(optimizer.param_groups, {})
        self._inner, self._member = optimizer, member

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One train step of the ring; `closure` computes the loss first, as in torch's optimizers."""
        if self._member.changes is not None:
            found = self._inner.step(closure) if closure else self._inner.step()
            self._member.changes.count_step()
            return found
        found = closure() if closure else None
        self._member.push_gradients([optimizers.options_of(group) for group in self.param_groups])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Of the script's optimizer: its groups, and with local steps its state."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave.

        Raises:
            TrainingError: It is the state of an optimizer that has taken steps, which the server's would not have.
        """
        if self._member.changes is None:
            optimizers.check_fresh(state_dict["state"].values())
        self._inner.load_state_dict(state_dict)
        self.param_groups = self._inner.param_groups
