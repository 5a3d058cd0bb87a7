"""One storage, named parts: several projections of the same input as one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .init import Fill, constant, normal


class FusedLinear(nn.Module):
    """Linear maps of one input, their weights stacked in one (sum of rows, in_features) matrix.

    ``parts`` gives each map's name and number of rows; ``part(name)`` is a view of its weight. With ``packed=False`` each part is a
    linear module of its own, under its name.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool, std: float, packed: bool = True) -> None:
        super().__init__()
        self.in_features, self.parts, self.packed, self.std = in_features, dict(parts), packed, std
        if packed:
            rows = sum(parts.values())
            self.weight = nn.Parameter(torch.empty(rows, in_features))
            self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        else:
            for name, rows in parts.items():
                self.add_module(name, Linear(in_features, rows, bias=bias, std=std))

    def initial_values(self) -> dict[str, Fill]:
        return {"weight": normal(self.std), "bias": constant(0.0)}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # (..., in_features) -> one (..., rows) a part
        """The parts' products in order; views of one product where packed."""
        if not self.packed:
            return tuple(getattr(self, name)(x) for name in self.parts)
        return self.product(x).split_with_sizes(list(self.parts.values()), dim=-1)

    def product(self, x: Tensor) -> Tensor:
        """The packed product (..., sum of rows), parts one after another in the last dimension; only where packed."""
        return nn.functional.linear(x, self.weight, self.bias)

    def part(self, name: str) -> Tensor:
        """The weight (rows, in_features) of a part, a view where packed. Raises a KeyError for an unknown part."""
        if not self.packed:
            return getattr(self, name).weight
        start = 0
        for other, rows in self.parts.items():
            if other == name:
                return self.weight[start : start + rows]
            start += rows
        raise KeyError(f"no part {name!r}; parts: {', '.join(self.parts)}")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, parts={self.parts}, packed={self.packed}"


class Linear(nn.Linear):
    """A linear module that declares its initial values."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.std = std

    def reset_parameters(self) -> None:
        """Nothing: ``initialize`` fills what ``initial_values`` declares, once there is storage."""

    def initial_values(self) -> dict[str, Fill]:
        return {"weight": normal(self.std), "bias": constant(0.0)}
