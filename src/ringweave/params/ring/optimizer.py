"""The optimizer that a script gets back: its `step` is the ring's, and the parameters that follow are the server's."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ringweave.params.ring.member import Member, Samples
from ringweave.params.serving import optimizers


class PushedOptimizer(Optimizer):
    """Stands for the script's optimizer, whose groups it shares, so that schedulers and clipping see the real ones.

    Its state is on the server, or, with local steps, in the script's optimizer on each rank.
    """

    def __init__(self, optimizer: Optimizer, member: Member, samples: Samples, local_steps: int = 0) -> None:
        """Changes nothing of the script's optimizer.

        Args:
            optimizer: The script's.
            member: This rank's part in its ring.
            samples: Filled by the loader with what was computed; emptied by every push.
            local_steps: Steps of the script's optimizer from one push to the next; 0 pushes each step's gradients.
        """
        super().__init__(optimizer.param_groups, {})
        self._inner, self._member, self._samples = optimizer, member, samples
        self._local_steps = local_steps
        self._num_since = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One train step of the ring; `closure` computes the loss first, as in torch's optimizers."""
        if self._local_steps:
            found = self._inner.step(closure) if closure else self._inner.step()
            self._num_since += 1
            if self._num_since == self._local_steps:
                self._member.push_change(self._samples.taken())
                self._num_since = 0
            return found
        found = closure() if closure else None
        options = [optimizers.options_of(group) for group in self.param_groups]
        self._member.push_gradients(self._samples.taken(), options)
        return found

    def move(self, member: Member) -> None:
        """Belong to another ring from here on; the one before rests."""
        self._member = member

    def break_off(self) -> None:
        """Compute nothing until the member's next `refresh`; local steps that are not pushed yet are lost.

        Waits for no other rank of the ring: it may have failed.
        """
        self._num_since = 0
        self._samples.clear()
        self._member.rest()

    def rest(self) -> None:
        """Push local steps that are not pushed yet, and compute nothing until the member's next `refresh`.

        Every rank of the ring calls it, or none.
        """
        if self._num_since:
            self._member.push_last_change(self._samples.taken())
            self._num_since = 0
        self._member.rest()

    def state_dict(self) -> dict[str, Any]:
        """Of the script's optimizer: its groups, and with local steps its state."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave.

        Raises:
            TrainingError: It is the state of an optimizer that has taken steps, which the server's would not have.
        """
        if not self._local_steps:
            optimizers.check_fresh(state_dict["state"].values())
        self._inner.load_state_dict(state_dict)
        self.param_groups = self._inner.param_groups
