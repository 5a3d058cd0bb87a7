"""Constants that a module needs as tensors: buffers that no checkpoint holds and no conversion can spoil."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class FixedBuffers(nn.Module):
    """A module with constant buffers, made from its config.

    ``fixed()`` returns them by name. They are made again, on the CPU, whenever the module moves: so they keep their dtype whatever the
    model takes, and hold their values after a build on the meta device. A subclass calls ``register_fixed()`` at the end of its constructor.
    """

    def fixed(self) -> dict[str, Tensor]:
        """The buffers by name, on the CPU."""
        raise TypeError(f"{type(self).__name__} has no fixed(); expected a method that returns its buffers by name")

    def register_fixed(self) -> None:
        """Make the buffers, on the device that torch's default says."""
        device = torch.empty(0).device
        for name, value in self._made().items():
            self.register_buffer(name, value.to(device), persistent=False)

    def _made(self) -> dict[str, Tensor]:
        with torch.device("cpu"):
            return self.fixed()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name, value in self._made().items():
            self._buffers[name] = value.to(self._buffers[name].device)
        return self
