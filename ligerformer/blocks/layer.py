"""A decoder layer: a list of sublayers, each a list of branches on one normed read of the residual stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..configs import ModelConfig, registry
from ..configs.schema import Config
from .state import AUX_LOSS, Context, State


def make(config: Config, model_config: ModelConfig, layer_index: int, **options: Any) -> Any:
    """The block of a config, its class found in the registry."""
    return registry.block_class(config.slot, config.type)(config, model_config, layer_index, **options)


class Layer(nn.Module):
    """``forward(state, ctx) -> state``. Branches are submodules under their own keys."""

    def __init__(self, model_config: ModelConfig, layer_index: int, first_site: int) -> None:
        super().__init__()
        config = model_config.layer(layer_index)
        self.sublayers = config.sublayers
        self.multipliers = {key: branch.multiplier for key, branch in config.branches.items()}
        for key, branch in config.branches.items():
            self.add_module(key, make(branch.block, model_config, layer_index))
        site = registry.block_class(model_config.residual.slot, model_config.residual.type).Site
        self.sites = nn.ModuleList(site(model_config.residual, model_config, first_site + j) for j in range(len(config.sublayers)))
        norms = () if config.norm is None else (make(config.norm, model_config, layer_index) for _ in config.sublayers)
        self.norms = nn.ModuleList(norms)
        keys = () if config.post_norm is None else config.branches
        self.post_norms = nn.ModuleDict({key: make(config.post_norm, model_config, layer_index) for key in keys})

    def forward(self, state: State, ctx: Context) -> State:
        post_norms = dict(self.post_norms.items())
        for keys, site, norm in itertools.zip_longest(self.sublayers, self.sites, self.norms):  # norm: None where the layer has none
            normed, state = site.read(state, norm)
            ys, shared = self._branches(keys, normed, ctx, state.shared)
            state = site.write(state, ys, [post_norms.get(key) for key in keys], shared)
        return state

    def _branches(
        self, keys: Sequence[str], normed: Tensor, ctx: Context, shared: dict[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Every branch's output, and the shared tensors with what the branches added; a ValueError where two add one name."""
        ys, added = [], dict(shared)
        givers: dict[str, str] = {}
        for key in keys:
            y = getattr(self, key)(normed, ctx, shared)
            if isinstance(y, tuple):
                y, new = y
                if AUX_LOSS in new and AUX_LOSS in added:
                    new = new | {AUX_LOSS: added[AUX_LOSS] + new[AUX_LOSS]}
                for name in new:
                    if name != AUX_LOSS and givers.setdefault(name, key) != key:
                        raise ValueError(
                            f"branches {givers[name]!r} and {key!r} of one sublayer both share {name!r}; rename one of the two"
                        )
                added |= new
            ys.append(y if self.multipliers[key] == 1.0 else y * self.multipliers[key])
        return ys, added
