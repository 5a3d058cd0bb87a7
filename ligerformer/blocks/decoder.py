"""The decoder: embed -> expand -> layers -> collapse -> head. No block type is named here."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..configs import ModelConfig, registry
from ..generate import generate
from ..kernels import dispatch, remake
from .cache import Cache
from .layer import Layer, make
from .state import AUX_LOSS, Context, State, documents_of, positions_of, shifted_labels

Recompute = Literal["none", "cheap", "layer"]


class Output(OrderedDict[str, Any]):
    """What a call returns: ``loss``, ``logits``, ``hidden_states``. Holds only what was made; an absent one reads as None.

    Also a mapping, and indexable by position, as trainers expect.
    """

    def __getattr__(self, name: str) -> Any:
        if name in ("loss", "logits", "hidden_states"):
            return self.get(name)
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


class Decoder(nn.Module):
    """A decoder language model built from a config; parameters start on the meta device (see ``build``)."""

    # Read by transformers' Trainer:
    accepts_loss_kwargs = True  # it then passes num_items_in_batch and leaves the averaging to us
    loss_type = "ForCausalLM"  # num_items_in_batch then counts labels past the first of each row, as the loss does
    main_input_name = "input_ids"

    def __init__(self, config: ModelConfig, *, recompute: Recompute = "none") -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.source: Any = None  # what conversion keeps for the way back
        self.load_report: Any = None
        with torch.device("meta"):
            self.embed = make(config.embed, config, -1)
            sites, layers = 0, []
            for i in range(config.num_layers):
                layers.append(Layer(config, i, sites))
                sites += len(layers[-1].sites)
            self.layers = nn.ModuleList(layers)
            self.ends = registry.block_class(config.residual.slot, config.residual.type).Ends(config.residual, config, -1)
            self.final_norm = None if config.final_norm is None else make(config.final_norm, config, -1)
            self.head = make(config.head, config, -1)
        if config.tie_embeddings:
            self.head.tie(self.embed)
        for path, module in self.named_modules():
            if hasattr(module, "cache_spec"):
                module.path = path

    @property
    def recompute(self) -> Recompute:
        """What the backward makes again, to the same bits; may be set, a ValueError for anything else.

        "none": all activations are kept. "cheap": of each layer, the normed inputs of products and the gated product, by pointwise kernels
        alone; no matrix product runs twice. Under torch.compile, and within somebody else's ``saved_tensors_hooks`` (an outer
        checkpoint's are such), these decide instead and "cheap" is "none". "layer": whole layers, from the state before each.
        """
        return self._recompute

    @recompute.setter
    def recompute(self, value: Recompute) -> None:
        self._recompute = _checked(value)

    def forward(
        self,
        input_ids: Tensor,  # (B, T) int64
        labels: Tensor | None = None,  # (B, T) int64
        *,
        attention_mask: Tensor | None = None,  # (B, T), or (B, cached + T) with a cache; 0 is padding
        position_ids: Tensor | None = None,  # (1 or B, T)
        document_ids: Tensor | None = None,  # (B, T)
        shift_labels: Tensor | None = None,  # (B, T)
        num_items_in_batch: float | Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        cache: Cache | None = None,
        return_logits: bool | None = None,
        return_hidden_states: bool = False,
    ) -> Output:
        """Run the model on token ids.

        With ``labels`` (shifted here by one, within documents) or ``shift_labels`` (taken as they are, also beside labels; -100 is ignored) the result has
        ``.loss``, an fp32 scalar: the mean over the labels that count, or their sum over ``num_items_in_batch``, plus the branches'
        auxiliary losses; logits are then made only if ``return_logits``. Without labels it has ``.logits`` (B, T, V), of the last
        ``logits_to_keep`` tokens (an int, or the indices as a tensor) where given. ``return_hidden_states`` adds ``.hidden_states``: the
        stream before each layer, then the normed output; num_layers + 1 tensors. A ``cache`` (``new_cache``) is filled in place.

        Raises a ValueError for an empty batch, tensors on the wrong device, or shapes that do not fit together.
        """
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(
                f"logits_to_keep: is {logits_to_keep}; expected 0 (all), the number of last tokens, or their indices as a tensor"
            )
        self._check_inputs(input_ids, cache, attention_mask, position_ids)
        self._check_per_token(input_ids, labels=labels, shift_labels=shift_labels, document_ids=document_ids)
        embedded = self.embed(input_ids)  # before the cache hears of the call: a token id out of range leaves it as it was
        ctx = self._context(input_ids, attention_mask, position_ids, document_ids, cache)
        h, hidden = self._hidden(embedded, ctx, return_hidden_states)
        output = Output()
        if labels is not None or shift_labels is not None:
            targets = shift_labels if shift_labels is not None else shifted_labels(labels, ctx.document_ids)
            output["loss"] = self.head.loss(h.hidden, targets, num_items=num_items_in_batch)
            if AUX_LOSS in h.shared:
                output["loss"] = output["loss"] + h.shared[AUX_LOSS]
        if return_logits if return_logits is not None else "loss" not in output:
            output["logits"] = self.head.logits(_kept(h.hidden, logits_to_keep))
        if hidden is not None:
            output["hidden_states"] = hidden
        return output

    def _hidden(self, embedded: Tensor, ctx: Context, keep: bool) -> tuple[_Final, tuple[Tensor, ...] | None]:
        """The normed output (B, T, C) with the shared tensors, and on demand the stream before each layer."""
        state = self.ends.expand(embedded)
        streams = []
        for layer in self.layers:
            if keep:
                state = self.ends.settle(state)
                streams.append(self.ends.hidden(state))
            state = self._layer(layer, state, ctx)
        hidden = self.ends.collapse(state, self.final_norm)
        return _Final(hidden, state.shared), (*streams, hidden) if keep else None

    def _layer(self, layer: nn.Module, state: State, ctx: Context) -> State:
        if torch.is_grad_enabled() and ctx.cache is None:  # run twice, a layer would fill its cache twice
            if self.recompute == "layer":
                return self._recomputed(layer, state, ctx)  # not settled: the same kernels as without recompute, so the same bits
            if self.recompute == "cheap" and remake.available():
                with remake.scope():
                    return layer(state, ctx)
        return layer(state, ctx)

    @staticmethod
    def _recomputed(layer: nn.Module, state: State, ctx: Context) -> State:
        """One layer, its activations recomputed in the backward on the implementations that the forward ran on.

        Every tensor of the state passes as an argument.
        """
        tensors, structure = state.flatten()
        after, mode = [], dispatch.mode()

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            with contextlib.nullcontext() if dispatch.mode() == mode else dispatch.use(mode):
                tensors, after_structure = layer(structure.restore(tensors), ctx).flatten()
            after.append(after_structure)
            return tensors

        tensors = checkpoint(run, *tensors, use_reentrant=False)
        return after[0].restore(tensors)

    def _context(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        cache: Cache | None,
    ) -> Context:
        tokens = (input_ids.shape[0], input_ids.shape[1])
        if attention_mask is not None:
            attention_mask = attention_mask[:, -tokens[1] :]
        documents = documents_of(tokens, document_ids, attention_mask, position_ids if cache is None else None)
        if position_ids is not None:
            positions = position_ids
            if not positions.is_cuda and not torch.compiler.is_compiling() and bool((positions < 0).any()):
                raise ValueError(f"position_ids: the least is {int(positions.min())}; expected 0 and up")
        elif cache is not None and cache.length:
            positions = cache.positions_after(tokens[1], documents)
        elif documents is not None:
            positions = positions_of(documents)
        else:
            positions = torch.arange(tokens[1], device=input_ids.device).unsqueeze(0)
        if cache is not None:
            documents = cache.extend(tokens[1], documents, positions)
        return Context(positions, documents, cache)

    def _check_inputs(self, input_ids: Tensor, cache: Cache | None, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise ValueError(f"input_ids: shape is {tuple(input_ids.shape)}; expected (batch, tokens), both at least 1")
        batch, new = input_ids.shape
        device = next(self.parameters()).device
        if input_ids.device != device:
            raise ValueError(f"input_ids is on {input_ids.device} and the model on {device}; move one of them")
        if cache is not None and cache.batch != batch:
            raise ValueError(f"cache: was made for {cache.batch} rows; input_ids has {batch}")
        allowed = {"position_ids": (position_ids, [(batch, new), (1, new)]), "attention_mask": (attention_mask, [(batch, new)])}
        if cache is not None and cache.length:
            allowed["attention_mask"][1].append((batch, cache.length + new))
        for name, (x, shapes) in allowed.items():
            if x is not None and (tuple(x.shape) not in shapes or x.device != device):
                expected = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
                raise ValueError(f"{name}: shape {tuple(x.shape)} on {x.device}; expected {expected} on {device}")

    def _check_per_token(self, input_ids: Tensor, **others: Tensor | None) -> None:
        for name, x in others.items():
            if x is not None and (x.shape != input_ids.shape or x.device != input_ids.device):
                raise ValueError(
                    f"{name}: shape {tuple(x.shape)} on {x.device}; "
                    f"expected {tuple(input_ids.shape)} on {input_ids.device}, as input_ids has"
                )

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype | None = None) -> Cache:
        """An empty key-value cache for ``batch`` rows of up to ``capacity`` tokens, in the weights' dtype unless another is given."""
        weight = next(self.parameters())
        specs = {m.path: m.cache_spec(batch, capacity, dtype or weight.dtype) for m in self.modules() if hasattr(m, "cache_spec")}
        return Cache(specs, batch, capacity, weight.device)

    def generate(
        self,
        input_ids: Tensor,  # (B, T) int64
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Collection[int] | None = None,
        seed: int | None = None,
        *,
        attention_mask: Tensor | None = None,  # (B, T)
        use_cache: bool = True,
        on_token: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Continue prompts by up to ``max_new_tokens`` tokens, (B, T + new); see :func:`ligerformer.generate.generate`."""
        return generate(
            self,
            input_ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_token_id=eos_token_id,
            seed=seed,
            attention_mask=attention_mask,
            use_cache=use_cache,
            on_token=on_token,
        )

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None, *, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """``recompute="layer"``, under transformers' name for it. ``use_reentrant`` may be given and changes no result.

        Raises a ValueError for the options that are not served: only every layer, recomputed whole, its input kept where it is.
        """
        asked = dict(activation_checkpointing_kwargs or {}, every_n_layers=every_n_layers, offload=offload)
        asked.pop("use_reentrant", None)
        others = {name: value for name, value in asked.items() if (name, value) not in (("every_n_layers", 1), ("offload", False))}
        if others:
            raise ValueError(f"activation checkpointing: {others} is not served; expected use_reentrant alone")
        self.recompute = "layer"

    def activation_checkpointing_disable(self) -> None:
        """``recompute="none"``, under transformers' name for it."""
        self.recompute = "none"

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """``activation_checkpointing_enable``, under its older name."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """``activation_checkpointing_disable``, under its older name."""
        self.activation_checkpointing_disable()


def _shown_to_trainers(signature: inspect.Signature) -> inspect.Signature:
    """Without ``shift_labels``, which then passes as a further keyword: transformers' Trainer evaluates no batch that lacks a parameter
    with "label" in its name, and a batch has one kind of labels or the other."""
    shown = [p for p in signature.parameters.values() if p.name != "shift_labels"]
    return signature.replace(parameters=[*shown, inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD, annotation=Tensor)])


Decoder.forward.__signature__ = _shown_to_trainers(inspect.signature(Decoder.forward))


@dataclasses.dataclass
class _Final:
    hidden: Tensor
    shared: dict[str, Tensor]


def _checked(recompute: str) -> Recompute:
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute is {recompute!r}; expected {' or '.join(repr(r) for r in get_args(Recompute))}")
    return recompute  # type: ignore[return-value]


def _kept(h: Tensor, logits_to_keep: int | Tensor | None) -> Tensor:
    """The rows of h (B, T, C) whose logits are wanted."""
    if logits_to_keep is None or (isinstance(logits_to_keep, int) and logits_to_keep == 0):
        return h
    return h[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else h[:, logits_to_keep]
