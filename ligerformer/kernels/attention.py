"""Softmax attention over (B, T, H, D) with causal, window and document masks, soft-cap and sinks.

For query i of head h, whose key-value head is h // (H / H_kv), over the keys j it sees:

    s_ij = scale * <q_i, k_j>,  with a soft-cap c: c * tanh(s_ij / c)
    p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink_h))          (the last term only with sinks)
    o_i  = sum_j p_ij v_j

Query i has *slot* query_start + i, key j slot j. With ``causal`` it sees j iff 0 <= slot_i - j < window; always only j < kv_length and
only keys of its own document. Sources: Vaswani et al. 2017 (arXiv 1706.03762); the tiled form and its backward, Dao 2023 (arXiv
2307.08691); soft-cap, Gemma 2 (arXiv 2408.00118); sinks, gpt-oss (arXiv 2508.10925).

Cost: 2 products forward (4 * Tq * Tk * D FLOPs a head, half of it when causal), 7 backward on the Triton kernels (5 are the least; dQ and
dK/dV each redo the scores, which buys a fixed order of summation). Saved for the backward: the inputs, the output and one fp32
log-sum-exp a query and head. The reference holds all Tq * Tk scores.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import checks, dispatch
from .attention_triton import attention_triton, unsupported
from .dispatch import Op

Implementation = Literal["auto", "triton", "sdpa", "reference"]

MAX_HEAD_DIM = 256
_HALVES = (torch.float16, torch.bfloat16)
# On a GPU cuDNN is the fastest of the library's kernels; the others take what it refuses.
_SDPA_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(
    q: Tensor,  # (B, Tq, H, D)
    k: Tensor,  # (B, Tk, H_kv, D)
    v: Tensor,  # (B, Tk, H_kv, D)
    /,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,  # (H,)
    document_ids: Tensor | None = None,  # (B, Tq)
    key_document_ids: Tensor | None = None,  # (B, Tk)
    query_start: int | Tensor | None = None,
    kv_length: int | Tensor | None = None,
    impl: Implementation = "auto",
) -> Tensor:
    """Attention of ``q`` over ``k`` and ``v``; returns a contiguous (B, Tq, H, D) in their dtype.

    Args:
        q, k, v: one dtype (fp64, fp32, bf16 or fp16), H a multiple of H_kv, D from 1 to 256. Under autocast they are cast to its dtype,
            as torch's own attention does. Read by their strides where D is dense, copied once elsewhere.
        causal: a query sees no later slot. ``window`` needs it.
        window: how many slots a query sees, its own included.
        softcap: bound c on the scores, c * tanh(s / c).
        scale: of the scores; D**-0.5 by default.
        sinks: one logit a head that joins the softmax's denominator and has no value; differentiable.
        document_ids: any int per query; a query sees only keys of the same id. Ids need not be contiguous or sorted (sorted is faster).
        key_document_ids: the keys' ids; by default ``document_ids`` where Tq == Tk.
        query_start: slot of the first query, counted in keys: an int, or an int tensor of no dimensions on q's device (read there,
            without a sync). 0 by default where Tq == Tk; a causal call with Tq != Tk must give it.
        kv_length: how many leading keys are valid, an int or such a tensor; Tk by default. What lies behind them, or (causal) behind the
            last query's slot, may be anything, NaN too: free places of a cache.
        impl: "triton" (ours), "sdpa" (torch's scaled_dot_product_attention; has no soft-cap and no sinks), "reference" (plain torch, fp32
            or fp64 inside, rounded once), or "auto": a ``kernels.use`` scope if one is in force; else on the CPU SDPA where it can
            express the call; on a GPU SDPA for half-precision attention with no mask but the causal one, unless
            ``torch.use_deterministic_algorithms(True)`` is set (its backward sums in no fixed order), and Triton for the rest.

    A query that sees no key gives 0 and takes part in no gradient. Documents are isolated bit for bit as long as what they hold is
    finite: a NaN or an infinity in a key that *some* query sees may reach every query of its row.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, causal, window, softcap, sinks)
    document_ids, key_document_ids = _check_documents(q, k, document_ids, key_document_ids)
    query_start, kv_length = _check_slots(q, k, causal, query_start, kv_length)
    if window is not None and _is_zero(query_start) and q.shape[1] <= window:
        window = None  # no query is far enough from the first key
    checks.one_of("attention", "impl", impl, ("auto", "triton", "sdpa", "reference"))
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": q.shape[-1] ** -0.5 if scale is None else float(scale),
        "sinks": sinks,
        "document_ids": document_ids,
        "key_document_ids": key_document_ids,
        "query_start": query_start,
        "kv_length": kv_length,
    }
    chosen, why = _choose(impl, q, k, v, options)
    if chosen == "triton":
        return OP.triton(q, k, v, **options)
    dispatch.ran("attention", "forward", chosen, why, q.is_cuda)
    return (OP.reference if chosen == "reference" else _sdpa)(q, k, v, **options)


# ---- choice ----


def _choose(impl: Implementation, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[str, str]:
    """The implementation that serves this call, and why; an error where one was asked for that cannot."""
    why = f"asked for by impl={impl!r}"
    if impl == "auto" and dispatch.mode() != "auto":
        impl, why = dispatch.mode(), f"asked for by kernels.use({dispatch.mode()!r})"
    if impl == "reference":
        return impl, why
    if impl == "triton":
        OP.why_not_triton((q, k, v), options, demanded=True)
        return impl, why
    not_sdpa = _why_not_sdpa(q, k, options)
    if impl == "sdpa":
        if not_sdpa is not None:
            raise ValueError(f"attention: impl='sdpa' was given, but torch's attention cannot serve this call: {not_sdpa}")
        return impl, why
    if q.is_cuda:
        if not_sdpa is None and _sdpa_is_faster(q, k, options):
            return "sdpa", "half precision with no mask but the causal one: torch's attention is the fastest"
        not_triton = OP.why_not_triton((q, k, v), options, demanded=False)
        return ("triton", "") if not_triton is None else ("reference", not_triton)
    not_triton = OP.why_not_triton((q, k, v), options, demanded=False)  # refuses devices that nothing serves
    if not_sdpa is None:
        return "sdpa", f"{not_triton}: torch's attention is the fastest there"
    return "reference", f"{not_triton}, and torch's attention cannot serve the call: {not_sdpa}"


def _why_not_sdpa(q: Tensor, k: Tensor, options: dict[str, Any]) -> str | None:
    if options["softcap"] is not None:
        return "it has no softcap"
    if options["sinks"] is not None:
        return "it has no sinks"
    if q.numel() == 0 or k.numel() == 0:
        return "there are no queries or no keys"
    return None


def _sdpa_is_faster(q: Tensor, k: Tensor, options: dict[str, Any]) -> bool:
    """On a GPU: where the library's fused kernels apply without a mask tensor, and their order of summation is acceptable."""
    return (
        q.dtype in _HALVES
        and q.shape[-1] % 8 == 0
        and q.shape[1] > 1
        and _needs_no_mask(q, k, options)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _needs_no_mask(q: Tensor, k: Tensor, options: dict[str, Any]) -> bool:
    """Whether the only mask is the causal triangle of a square, or none at all."""
    if options["document_ids"] is not None or options["window"] is not None:
        return False
    whole = not isinstance(options["kv_length"], Tensor) and options["kv_length"] == k.shape[1]
    return whole and (not options["causal"] or (_is_zero(options["query_start"]) and q.shape[1] == k.shape[1]))


def _is_zero(start: int | Tensor) -> bool:
    return not isinstance(start, Tensor) and start == 0


# ---- the reference ----


def _visible(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    window: int | None,
    document_ids: Tensor | None,
    key_document_ids: Tensor | None,
    query_start: int | Tensor,
    kv_length: int | Tensor,
    **_: Any,
) -> Tensor:
    """Which query sees which key: bool, (B or 1, Tq, Tk)."""
    slots = (torch.arange(q.shape[1], device=q.device) + query_start)[None, :, None]  # (1, Tq, 1)
    keys = torch.arange(k.shape[1], device=q.device)[None, None]  # (1, 1, Tk)
    seen = (keys < kv_length).expand(1, q.shape[1], -1)
    if causal:
        seen = seen & (keys <= slots)
    if window is not None:
        seen = seen & (slots - keys < window)
    if document_ids is not None:
        seen = seen & (document_ids[:, :, None] == key_document_ids[:, None])
    return seen


def _blank_unseen(seen: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with zeros where no query looks: what lies there (free cache slots) need not be a number, and 0 * NaN is NaN."""
    used = seen.any(1)[..., None, None]  # (B or 1, Tk, 1, 1)
    return torch.where(used, k, 0), torch.where(used, v, 0)


def _attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, softcap: float | None, scale: float, sinks: Tensor | None, **masks: Any
) -> Tensor:
    """The formula as it stands, in fp32 (fp64 for fp64 inputs), rounded once at the end."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    seen = _visible(q, k, **masks)
    k, v = _blank_unseen(seen, k, v)

    with torch.autocast(q.device.type, enabled=False):
        # (B, H_kv, G, Tq, D) and (B, H_kv, 1, Tk, D)
        grouped = q.to(compute).reshape(batch, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        keys, values = (x.to(compute).transpose(1, 2)[:, :, None] for x in (k, v))
        scores = (grouped @ keys.transpose(-1, -2)) * scale  # (B, H_kv, G, Tq, Tk)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(seen[:, None, None], scores, -math.inf)

        top = scores.detach().amax(-1, keepdim=True) if num_keys else scores.new_full((*scores.shape[:-1], 1), -math.inf)
        if sinks is not None:
            sink = sinks.to(compute).view(num_kv_heads, group, 1, 1)
            top = torch.maximum(top, sink.detach())
        top = torch.where(top == -math.inf, 0, top)  # a query that sees nothing
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sink - top)
        out = (weights / torch.where(total == 0, 1, total)) @ values  # (B, H_kv, G, Tq, D)
        return out.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads, head_dim).contiguous().to(q.dtype)


# ---- torch's own attention ----


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, softcap: None, sinks: None, scale: float, **masks: Any) -> Tensor:
    """torch's attention: without a mask tensor where the call is square and causal or where slicing the keys says it all."""
    if masks["document_ids"] is None:
        k, v, masks = _slice_keys(q, k, v, masks)
    if _needs_no_mask(q, k, masks):
        if q.shape[1] == 1:  # a group's heads as the queries of their key head: keys and values are read once a group
            heads = q.reshape(q.shape[0], k.shape[2], -1, q.shape[3])  # (B, H_kv, G, D)
            return scaled_dot_product_attention(heads, k.transpose(1, 2), v.transpose(1, 2), scale=scale).reshape(q.shape)
        return _call_sdpa(q, k, v, scale, is_causal=masks["causal"])
    seen = _visible(q, k, **masks)
    k, v = _blank_unseen(seen, k, v)
    some = seen.any(-1, keepdim=True)  # (B or 1, Tq, 1)
    # Backends differ on a query that sees nothing: let it see all of the row, and drop the result and with it every gradient.
    out = _call_sdpa(q, k, v, scale, attn_mask=(seen | ~some)[:, None])
    return torch.where(some[..., None], out, 0)


def _slice_keys(q: Tensor, k: Tensor, v: Tensor, masks: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Drop the keys that no query sees, where the slots are host numbers; shifts ``query_start`` accordingly."""
    start, end = masks["query_start"], masks["kv_length"]
    if isinstance(start, Tensor) or isinstance(end, Tensor):
        return k, v, masks
    num_queries, first = q.shape[1], 0
    if masks["causal"]:
        end = min(end, start + num_queries)
        first = max(0, start - masks["window"] + 1) if masks["window"] is not None else 0
        first = min(first, end)
    if first == 0 and end == k.shape[1]:
        rest = masks
    elif end == first:
        return k, v, masks  # nothing is seen: the mask says so
    else:
        k, v = k[:, first:end], v[:, first:end]
        rest = {**masks, "query_start": start - first, "kv_length": end - first}
    if num_queries == 1 and masks["causal"] and rest["query_start"] == k.shape[1] - 1:
        rest = {**rest, "causal": False, "window": None}  # one query that sees every key left
    return k, v, rest


def _call_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    options: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": q.shape[2] != k.shape[2]}
    if q.is_cuda:
        with sdpa_kernel(_SDPA_ORDER, set_priority=True):
            out = scaled_dot_product_attention(*heads_first, **options)
    else:
        out = scaled_dot_product_attention(*heads_first, **options)
    return out.transpose(1, 2).contiguous()


# ---- checks ----


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast torch's attention runs in the autocast dtype (fp64 excepted): so does this, whichever implementation serves it."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        checks.is_tensor("attention", name, x)
    kind = q.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, softcap: float | None, sinks: Tensor | None) -> None:
    checks.has_shape("attention", "q", q, ("B", "Tq", "H", "D"))
    batch, _, num_heads, head_dim = q.shape
    checks.has_shape("attention", "k", k, (batch, "Tk", "H_kv", head_dim))
    checks.has_shape("attention", "v", v, tuple(k.shape))
    num_kv_heads = k.shape[2]
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"attention: q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; expected one dtype")
    checks.same_device("attention", q=q, k=k, v=v, sinks=sinks)
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"attention: q has {num_heads} heads and k has {num_kv_heads}; expected a multiple of k's")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"attention: q has head_dim {head_dim}; expected 1 to {MAX_HEAD_DIM}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"attention: window is {window!r}; expected an int of at least 1 (it counts the query's own slot), or None")
    if window is not None and not causal:
        raise ValueError(
            f"attention: window is {window} and causal is False; a window looks back from a causal query, so it needs causal=True"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap is {softcap!r}; expected a positive number, or None")
    if sinks is not None:
        checks.is_tensor("attention", "sinks", sinks)
        checks.has_shape("attention", "sinks", sinks, (num_heads,))


def _check_documents(
    q: Tensor, k: Tensor, document_ids: Tensor | None, key_document_ids: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Both id tensors, checked; the keys' default to the queries'."""
    if document_ids is None:
        if key_document_ids is not None:
            raise ValueError("attention: key_document_ids came without document_ids; expected both, or neither")
        return None, None
    checks.is_tensor("attention", "document_ids", document_ids, checks.INTS)
    checks.has_shape("attention", "document_ids", document_ids, (q.shape[0], q.shape[1]))
    if key_document_ids is None:
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"attention: q has {q.shape[1]} tokens and k {k.shape[1]}: document_ids needs key_document_ids beside it")
        key_document_ids = document_ids
    checks.is_tensor("attention", "key_document_ids", key_document_ids, checks.INTS)
    checks.has_shape("attention", "key_document_ids", key_document_ids, (k.shape[0], k.shape[1]))
    checks.same_device("attention", q=q, document_ids=document_ids, key_document_ids=key_document_ids)
    return document_ids, key_document_ids


def _check_slots(
    q: Tensor, k: Tensor, causal: bool, query_start: int | Tensor | None, kv_length: int | Tensor | None
) -> tuple[int | Tensor, int | Tensor]:
    """``query_start`` and ``kv_length`` with their defaults; what lies on a device is taken as it is (a check would be a sync)."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    if query_start is None:
        if causal and num_queries != num_keys:
            raise ValueError(
                f"attention: q has {num_queries} tokens and k {num_keys}: a causal call needs query_start, the slot of the first query "
                f"among the keys ({num_keys - num_queries} where the queries are the last)"
            )
        query_start = 0
    kv_length = num_keys if kv_length is None else kv_length
    for name, value, limit in (("query_start", query_start, None), ("kv_length", kv_length, num_keys)):
        if isinstance(value, Tensor):
            checks.is_tensor("attention", name, value, checks.INTS)
            checks.has_shape("attention", name, value, ())
            checks.same_device("attention", q=q, **{name: value})
        elif isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"attention: {name} is a {type(value).__name__}; expected an int or an int tensor of no dimensions")
        elif value < 0 or (limit is not None and value > limit):
            raise ValueError(
                f"attention: {name} is {value}; expected at least 0" + ("" if limit is None else f" and at most k's {limit} tokens")
            )
    return query_start, kv_length


OP = Op("attention", _attention_reference, attention_triton, unsupported)
