"""Scaled losses for float16: torch's GradScaler, with one verdict of all stages and replicas."""

from typing import Any

import torch
from torch.optim import Optimizer

from ringweave.pipeline.running.groups import Groups


class GradScaler(torch.amp.GradScaler):
    """Skips an update on all ranks if a gradient on any of them is infinite or not a number.

    ```python
    scaler = pipeline.grad_scaler()
    loss = pipeline.forward_backward(x, target=y, scale=scaler.get_scale())
    scaler.unscale_(pipeline.optimizer)
    pipeline.clip_grad_norm(1.0)
    scaler.step(pipeline.optimizer)
    scaler.update()
    ```
    """

    def __init__(self, groups: Groups, device: torch.device, **options: Any) -> None:
        super().__init__(device.type, **options)
        self._groups, self._own_device = groups, device
        self.scale(torch.ones((), device=device))  # torch makes its state at the first loss

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide this rank's gradients by the scale, and let all ranks know what was found."""
        super().unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        own = max((float(value) for value in found.values()), default=0.0)
        anywhere = float(self._groups.greatest(torch.tensor([own], dtype=torch.float64)))
        found.clear()
        found[self._own_device] = torch.full((), anywhere, device=self._own_device)
