"""The table of cases that the contract tests walk: one row an op and option set.

A row says how to draw inputs and which bad calls are refused; the contract (purity, wanted gradients, precision, determinism,
no host syncs, compilation, any size, errors) is tested by test_contract.py for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Draw:
    """Random inputs on one device in one dtype. The same seed gives the same numbers on every device and in every dtype."""

    def __init__(self, seed: int, device: str | torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """A floating tensor, rounded once to ``dtype`` (default: this draw's)."""
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64) * std + mean
        if self.dtype != torch.float64:  # every dtype sees the same numbers: representable in bf16 where the op is tested in it
            x = x.to(torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float16 if self.dtype == torch.float16 else torch.float32)
        return x.to(dtype or self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype).to(self.device)


class HollowDraw(Draw):
    """Tensors of the right shapes without numbers (memory that is never touched), for launches that are recorded and not run."""

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, low, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Wrong:
    """A bad call: ``change`` edits (args, kwargs) of a good one; ``error`` must be raised with a message matching ``match``."""

    label: str
    change: Callable[[list[Any], dict[str, Any]], Any]
    error: type[Exception]
    match: str


@dataclass(frozen=True)
class Case:
    """One op with one set of options.

    ``make(draw, rows)`` returns (args, kwargs) for that many tokens; each floating tensor among them is a differentiable input unless
    its keyword (or the position as a string, "2") is in ``constants``. ``ulps`` bounds each output's and gradient's distance from
    fp64 (max|a - b| / max|b|) in units of its dtype's epsilon. Rows in ``rows`` are walked, with one row and none among them
    where the op has such a call.

    Options: ``inside`` is set where results wider than the inputs still carry a rounding to the inputs' dtype (a product in bf16): they
    are then bounded by its epsilon. ``eager`` is the same call in plain eager code, compared under autocast. ``large`` is ``make`` at the
    sizes of a published model: what is compiled ahead of time, on hollow tensors that hold no numbers.
    """

    op: str
    make: Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]
    label: str = ""
    constants: tuple[str, ...] = ()
    ulps: float = 4.0
    rows: tuple[int, ...] = (0, 1, 2, 7, 33)
    wrong: tuple[Wrong, ...] = ()
    inside: bool = False
    eager: Callable[..., Any] | None = None
    large: Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]] | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op


CASES: list[Case] = []

# ---- norms: rms_norm, add_rms_norm ----


def _normed(inputs: int, width: int, **options: Any) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    """x (and a residual), then a weight about 1 - offset."""

    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weight = draw.normal(width, std=0.3, mean=1.0 - options.get("offset", 0.0))
        return (*(draw.normal(rows, width) for _ in range(inputs)), weight), {"eps": 1e-6, **options}

    return make


def _eager_rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, casting: str = "input") -> Tensor:
    """As the Llama (input) and Gemma (fp32) families write it."""
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if casting == "input" else (normed * (offset + weight.float())).type_as(x)


def _eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return _eager_rms_norm(summed, weight, **options), summed


_WRONG_NORM = (
    Wrong("eps", lambda args, kwargs: kwargs.update(eps=-1.0), ValueError, "eps is -1.0"),
    Wrong("offset", lambda args, kwargs: kwargs.update(offset="1"), TypeError, "offset is '1'"),
    Wrong("casting", lambda args, kwargs: kwargs.update(casting="bf16"), ValueError, "casting is 'bf16'"),
    Wrong("weight-shape", lambda args, kwargs: args.append(args.pop()[:-1]), ValueError, "weight has shape"),
    Wrong("weight-dtype", lambda args, kwargs: args.append(args.pop().long()), TypeError, "weight has dtype int64"),
    Wrong("width", lambda args, kwargs: args.__setitem__(0, args[0][:, :0]), ValueError, "x has shape"),
)

for _op, _inputs, _eager in (("rms_norm", 1, _eager_rms_norm), ("add_rms_norm", 2, _eager_add_rms_norm)):
    _gemma = {"offset": 1.0, "casting": "fp32"}
    _residual = (
        () if _inputs == 1 else (Wrong("residual", lambda args, kwargs: args.insert(1, args.pop(1)[:1]), ValueError, "residual has"),)
    )
    CASES += [
        Case(_op, _normed(_inputs, 97), wrong=_WRONG_NORM + _residual, eager=_eager, large=_normed(_inputs, 4096)),
        Case(_op, _normed(_inputs, 36, **_gemma), "gemma", eager=_eager, large=_normed(_inputs, 1152, **_gemma)),
        Case(_op, _normed(_inputs, 16411), "wide", rows=(0, 2, 5), large=_normed(_inputs, 16384)),
    ]
CASES.append(Case("rms_norm", lambda draw, rows: ((draw.normal(rows, 5, 24),), {"eps": 1e-6}), "plain"))

# ---- rope: rope, qk_norm_rope ----


def _rope_inputs(
    batch: int, heads: tuple[int, int], head_dim: int, rotated: int, *, tables: int = 1, weights: bool = False, **options: Any
) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        q, k = (draw.normal(batch, rows, n, head_dim) for n in heads)
        angles = draw.normal(tables, rows, rotated // 2, std=5.0, dtype=torch.float32)
        weight = [draw.normal(head_dim, std=0.3, mean=1.0 - options.get("offset", 0.0)) for _ in range(2 * weights)]
        return (q, k, *weight, angles.cos(), angles.sin()), options

    return make


_WRONG_ROPE = (
    Wrong("q-shape", lambda args, kwargs: args.__setitem__(0, args[0][0]), ValueError, "q has shape"),
    Wrong("k-shape", lambda args, kwargs: args.__setitem__(1, args[1][..., :-1]), ValueError, "k has shape"),
    Wrong("k-dtype", lambda args, kwargs: args.__setitem__(1, args[1].half()), TypeError, "k has dtype"),
    Wrong("cos-batch", lambda args, kwargs: args.__setitem__(-2, args[-2].expand(3, -1, -1)), ValueError, "cos has shape"),
    Wrong("cos-tokens", lambda args, kwargs: args.__setitem__(-2, args[-2][:, :-1]), ValueError, "cos has shape"),
    Wrong("cos-width", lambda args, kwargs: args.__setitem__(-2, args[-2].repeat(1, 1, 9)), ValueError, "cos has shape"),
    Wrong("sin-shape", lambda args, kwargs: args.__setitem__(-1, args[-1][..., :-1]), ValueError, "sin has shape"),
    Wrong("cos-grad", lambda args, kwargs: args[-2].requires_grad_(), ValueError, "cos requires a gradient"),
)
_QK_NORM = {"weights": True, "eps": 1e-6}
_QK_GEMMA = {**_QK_NORM, "offset": 1.0, "casting": "fp32"}

CASES += [
    Case("rope", _rope_inputs(1, (3, 1), 10, 10), "", ("2", "3"), wrong=_WRONG_ROPE, large=_rope_inputs(1, (32, 8), 128, 128)),
    Case("rope", _rope_inputs(2, (2, 4), 16, 6, tables=2), "partial", ("2", "3"), large=_rope_inputs(2, (32, 32), 80, 32, tables=2)),
    Case(
        "qk_norm_rope",
        _rope_inputs(1, (3, 1), 10, 10, **_QK_NORM),
        "",
        ("4", "5"),
        wrong=(
            *_WRONG_ROPE,
            _WRONG_NORM[0],
            Wrong("weight-shape", lambda args, kwargs: args.__setitem__(2, args[2][:-1]), ValueError, "q_weight has shape"),
            Wrong("weight-dtype", lambda args, kwargs: args.__setitem__(3, args[3].half()), TypeError, "k_weight has dtype"),
        ),
        large=_rope_inputs(1, (32, 8), 128, 128, **_QK_NORM),
    ),
    Case(
        "qk_norm_rope",
        _rope_inputs(2, (2, 4), 16, 6, tables=2, **_QK_GEMMA),
        "gemma-partial",
        ("4", "5"),
        large=_rope_inputs(1, (4, 1), 256, 256, **_QK_GEMMA),
    ),
]

# ---- gated products: swiglu, geglu ----


def _glu_pair(width: int, **options: Any) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda draw, rows: ((draw.normal(rows, width, std=2.0), draw.normal(rows, width)), options)


def _glu_packed(width: int, **options: Any) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda draw, rows: ((draw.normal(rows, 2 * width, std=2.0),), options)


def _glu_cases(op: str, label: str, activation: Callable[[Tensor], Tensor], **options: Any) -> list[Case]:
    wrong = [
        Wrong("up-shape", lambda args, kwargs: args.__setitem__(1, args[1][..., :-1]), ValueError, "up has shape"),
        Wrong("up-dtype", lambda args, kwargs: args.__setitem__(1, args[1].long()), TypeError, "up has dtype int64"),
    ]
    wrong_packed = [Wrong("odd", lambda args, kwargs: args.__setitem__(0, args[0][..., 1:]), ValueError, "gate_up has shape")]
    if options:
        unknown = Wrong("form", lambda args, kwargs: kwargs.update(approximate="sigmoid"), ValueError, "approximate is 'sigmoid'")
        wrong, wrong_packed = [*wrong, unknown], [*wrong_packed, unknown]

    def eager_packed(gate_up: Tensor, **options: Any) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    ulps = 8.0 if label == "tanh" else 4.0  # torch's vectorised tanh on the CPU errs by an ulp or two, times inputs of up to 4
    return [
        Case(
            op,
            _glu_pair(67, **options),
            label,
            ulps=ulps,
            wrong=tuple(wrong),
            eager=lambda gate, up, **options: activation(gate) * up,
            large=_glu_pair(14336, **options),
        ),
        Case(
            op + "_packed",
            _glu_packed(67, **options),
            label,
            ulps=ulps,
            wrong=tuple(wrong_packed),
            eager=eager_packed,
            large=_glu_packed(14336, **options),
        ),
    ]


CASES += _glu_cases("swiglu", "", torch.nn.functional.silu)
CASES += _glu_cases("geglu", "tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh"), approximate="tanh")
CASES += _glu_cases("geglu", "erf", torch.nn.functional.gelu, approximate="none")

# ---- embedding ----


def _embedding(vocab_size: int, hidden_size: int) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda draw, rows: ((draw.integers(0, vocab_size, rows), draw.normal(vocab_size, hidden_size)), {})


CASES.append(
    Case(
        "embedding",
        _embedding(5, 67),  # few ids: each stands several times
        wrong=(
            Wrong("ids-float", lambda args, kwargs: args.__setitem__(0, args[0].float()), TypeError, "ids has dtype float32"),
            Wrong("weight-shape", lambda args, kwargs: args.__setitem__(1, args[1][0]), ValueError, "weight has shape"),
        ),
        eager=torch.nn.functional.embedding,
        large=_embedding(32768, 4096),
    )
)

# ---- cross-entropy ----


def _labels(draw: Draw, rows: int, num_classes: int) -> Tensor:
    """Labels in range, every fourth one ignored from the third row on."""
    labels = draw.integers(0, num_classes, rows)
    return torch.where(torch.arange(rows, device=labels.device) % 4 == 2, -100, labels)


def _cross_entropy(num_classes: int, **options: Any) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weight = {"class_weight": draw.normal(num_classes).abs() + 0.25} if options.get("class_weight") else {}
        return (draw.normal(rows, num_classes, std=3.0), _labels(draw, rows, num_classes)), {**options, **weight}

    return make


def _set(**options: Any) -> Callable[[list[Any], dict[str, Any]], Any]:
    return lambda args, kwargs: kwargs.update(options)


_BAD_LOSS_OPTIONS = (
    Wrong("smoothing", _set(label_smoothing=1.5), ValueError, "label_smoothing"),
    Wrong("softcap", _set(softcap=-1.0), ValueError, "softcap"),
    Wrong("z_loss", _set(z_loss=-1.0), ValueError, "z_loss"),
    Wrong("reduction", _set(reduction="average"), ValueError, "reduction"),
    Wrong("class weights", _set(class_weight=torch.ones(3)), ValueError, "class_weight"),
)
_ALL_LOSS_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "class_weight": True}
CASES += [
    Case(
        "cross_entropy",
        _cross_entropy(53),
        eager=lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels),
        large=_cross_entropy(128_256),
        wrong=(
            *_BAD_LOSS_OPTIONS,
            Wrong("no tensor", lambda args, kwargs: args.__setitem__(0, [1.0]), TypeError, "logits"),
            Wrong("label dtype", lambda args, kwargs: args.__setitem__(1, args[1].float()), TypeError, "labels"),
            Wrong("label shape", lambda args, kwargs: args.__setitem__(1, args[1][None]), ValueError, "labels"),
        ),
    ),
    Case("cross_entropy", _cross_entropy(53, reduction="none"), "none", large=_cross_entropy(50_257, reduction="none")),
    Case(
        "cross_entropy",
        _cross_entropy(53, reduction="sum", **_ALL_LOSS_OPTIONS),
        "options",
        constants=("class_weight",),
        large=_cross_entropy(262_144, **_ALL_LOSS_OPTIONS),
    ),
]

# ---- linear cross-entropy ----


def _linear_cross_entropy(
    num_classes: int, *, bias: bool = False, **options: Any
) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden_size = 24
        tensors = {"bias": draw.normal(num_classes)} if bias else {}
        if options.get("class_weight"):
            tensors["class_weight"] = draw.normal(num_classes).abs() + 0.25
        args = draw.normal(rows, hidden_size), draw.normal(num_classes, hidden_size, std=0.5), _labels(draw, rows, num_classes)
        return args, {**options, **tensors}

    return make


def _eager_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight).float(), labels)


CASES += [
    Case(
        "linear_cross_entropy",
        _linear_cross_entropy(53),
        inside=True,
        eager=_eager_linear_cross_entropy,
        large=_linear_cross_entropy(128_256),
        wrong=(
            *_BAD_LOSS_OPTIONS,
            Wrong("hidden size", lambda args, kwargs: args.__setitem__(1, args[1][:, 1:]), ValueError, "weight"),
            Wrong("weight dtype", lambda args, kwargs: args.__setitem__(1, args[1].double()), TypeError, "weight"),
            Wrong("label shape", lambda args, kwargs: args.__setitem__(2, args[2][None]), ValueError, "labels"),
            Wrong("bias shape", _set(bias=torch.ones(3)), ValueError, "bias"),
            Wrong("chunk_bytes", _set(chunk_bytes=0), ValueError, "chunk_bytes"),
            Wrong("accum_dtype", _set(accum_dtype=torch.int32), ValueError, "accum_dtype"),
            Wrong("num_valid", _set(num_valid=10**6), ValueError, "num_valid"),
            Wrong("num_items of a sum", _set(num_items=3, reduction="sum"), ValueError, "num_items"),
        ),
    ),
    Case(
        "linear_cross_entropy",
        _linear_cross_entropy(53, bias=True, reduction="none", chunk_bytes=1000),
        "none",
        inside=True,
        large=_linear_cross_entropy(50_257, bias=True, reduction="none"),
    ),
    Case(
        "linear_cross_entropy",
        _linear_cross_entropy(53, bias=True, chunk_bytes=1000, num_items=11, logit_scale=0.5, **_ALL_LOSS_OPTIONS),
        "options",
        inside=True,
        constants=("class_weight",),
        large=_linear_cross_entropy(262_144, bias=True, num_items=11, logit_scale=0.5, **_ALL_LOSS_OPTIONS),
    ),
]

# ---- attention ----


def _attention(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    sinks: bool = False,
    documents: bool = False,
    cached: int = 0,
    num_queries: int | None = None,
    **options: Any,
) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Two rows of tokens; ``cached`` keys come before the queries, whose first slot is then a number on the device."""

    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        queries, keys = num_queries or rows, cached + rows
        shapes = ((queries, num_heads), (keys, num_kv_heads), (keys, num_kv_heads))
        args = tuple(draw.normal(2, tokens, heads, head_dim) for tokens, heads in shapes)
        kwargs = dict(options)
        if sinks:
            kwargs["sinks"] = draw.normal(num_heads)
        if documents:
            kwargs["document_ids"] = draw.integers(-1, 2, 2, queries)
            kwargs["key_document_ids"] = draw.integers(-1, 2, 2, keys) if cached else kwargs["document_ids"]
        if cached:
            kwargs["query_start"] = draw.integers(keys - queries, keys - queries + 1)
        return args, kwargs

    return make


def _attention_eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _set(**options: Any) -> Callable[[list[Any], dict[str, Any]], None]:
    return lambda args, kwargs: kwargs.update(options)


_ATTENTION_WRONG = (
    Wrong("q-dims", lambda args, kwargs: args.__setitem__(0, args[0][0]), ValueError, "q has shape"),
    Wrong("k-head-dim", lambda args, kwargs: args.__setitem__(1, args[1][..., :-1]), ValueError, "k has shape"),
    Wrong("v-tokens", lambda args, kwargs: args.__setitem__(2, args[2][:, :-1]), ValueError, "v has shape"),
    Wrong("v-dtype", lambda args, kwargs: args.__setitem__(2, args[2].double()), TypeError, "expected one dtype"),
    Wrong("heads", lambda args, kwargs: args.__setitem__(0, args[0][:, :, :3]), ValueError, "q has 3 heads and k has 2"),
    Wrong(
        "head-dim", lambda args, kwargs: args.__setitem__(slice(0, 3), [x.repeat(1, 1, 1, 17) for x in args]), ValueError, "head_dim 272"
    ),
    Wrong("window", _set(window=0), ValueError, "window is 0"),
    Wrong("window-not-causal", _set(window=2, causal=False), ValueError, "needs causal=True"),
    Wrong("softcap", _set(softcap=-1.0), ValueError, "softcap is -1.0"),
    Wrong("sinks", lambda args, kwargs: kwargs.update(sinks=args[0][0, 0, :3, 0]), ValueError, "sinks has shape"),
    Wrong("no-slot", lambda args, kwargs: args.__setitem__(0, args[0][:, :2]), ValueError, "needs query_start"),
    Wrong("slot", _set(query_start=-1), ValueError, "query_start is -1"),
    Wrong("slot-type", _set(query_start=1.0), TypeError, "query_start is a float"),
    Wrong("length", _set(kv_length=1000), ValueError, "kv_length is 1000"),
    Wrong("ids", lambda args, kwargs: kwargs.update(document_ids=args[0][:, 1:, 0, 0].long()), ValueError, "document_ids has shape"),
    Wrong("ids-dtype", lambda args, kwargs: kwargs.update(document_ids=args[0][:, :, 0, 0]), TypeError, "document_ids has dtype"),
    Wrong(
        "key-ids-alone", lambda args, kwargs: kwargs.update(key_document_ids=args[1][:, :, 0, 0].long()), ValueError, "without document_ids"
    ),
    Wrong("impl", _set(impl="flash"), ValueError, "impl is 'flash'"),
)

# An error of the scores, a few of their ulps, becomes one of the probabilities times the scores' size (about 4 in units of log2 here): 8.
# A lone token that sees itself alone has the gradients 0 for its query and its key: no distance can be measured against them.
_NOT_ONE = (0, 2, 7, 33)

CASES += [
    Case(
        "attention",
        _attention(16, 4, 2),
        "causal",
        ulps=8.0,
        rows=_NOT_ONE,
        wrong=_ATTENTION_WRONG,
        eager=_attention_eager,
        large=_attention(128, 32, 8),
    ),
    Case(
        "attention",
        _attention(24, 2, 2, window=5, softcap=2.0, sinks=True, documents=True),
        "all-masks",
        ulps=8.0,
        large=_attention(256, 8, 4, window=1024, softcap=50.0),
    ),
    Case(
        "attention",
        _attention(16, 6, 2, cached=9),
        "cached",
        ulps=8.0,
        rows=(0, 1, 2, 7),
        large=_attention(64, 64, 8, cached=4095, num_queries=1, sinks=True, documents=True, window=128),
    ),
]

# ---- hyper-connections ----


def _fp32(draw: Draw) -> torch.dtype:
    """The coefficients' dtype: fp32 beside half streams, as models hold them."""
    return torch.float64 if draw.dtype == torch.float64 else torch.float32


def _mhc_coefficients(
    n: int, hidden_size: int, groups: int = 3, phi_wide: bool = False, **options: Any
) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        columns = n * n + 2 * n if groups == 3 else n
        # With one group, alpha's gradient is one signed sum over everything: means away from 0 keep it from cancelling.
        x_mean, phi_mean = (0.0, 0.0) if groups == 3 else (0.5, 2.0 / (0.5 * n * hidden_size))
        std = (n * hidden_size) ** -0.5
        phi = draw.normal(n * hidden_size, columns, std=std, mean=phi_mean, dtype=_fp32(draw) if phi_wide else None)
        parameters = (draw.normal(columns, dtype=_fp32(draw)), draw.normal(groups, mean=1.0, std=0.5, dtype=_fp32(draw)))
        return (draw.normal(rows, n, hidden_size, mean=x_mean), phi, *parameters), {"eps": 1e-6, **options}

    return make


def _mhc_read(n: int, hidden_size: int) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda draw, rows: ((draw.normal(rows, n, hidden_size), draw.normal(rows, n, dtype=_fp32(draw))), {})


def _mhc_write(n: int, hidden_size: int) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        coefficients = (draw.normal(rows, n, dtype=_fp32(draw)), draw.normal(rows, n, n, dtype=_fp32(draw)))
        return (draw.normal(rows, n, hidden_size), draw.normal(rows, hidden_size), *coefficients), {}

    return make


def _cut(position: int) -> Callable[[list[Any], dict[str, Any]], None]:
    return lambda args, kwargs: args.__setitem__(position, args[position][..., :-1])


_MHC_WRONG = (
    Wrong("phi-shape", _cut(1), ValueError, "phi has shape"),
    Wrong("bias-shape", _cut(2), ValueError, "bias has shape"),
    Wrong("alpha-shape", _cut(3), ValueError, "alpha has shape"),
    Wrong("streams", lambda args, kwargs: args.__setitem__(0, args[0].repeat(1, 9, 1)), ValueError, "1 <= n <= 8"),
    Wrong("eps", lambda args, kwargs: kwargs.update(eps=-1.0), ValueError, "eps is -1.0"),
)
# 16 ulps: a mixing entry passes through 2 divisions an iteration and its gradient through 4, each good to 2 ulps on a GPU.
CASES += [
    Case(
        "mhc_coefficients",
        _mhc_coefficients(4, 37, iterations=6),
        ulps=16.0,
        wrong=(
            *_MHC_WRONG,
            Wrong("iterations", lambda args, kwargs: kwargs.update(iterations=0), ValueError, "iterations is 0"),
            Wrong("layout", lambda args, kwargs: kwargs.update(res_layout="rows"), ValueError, "res_layout is 'rows'"),
        ),
        large=_mhc_coefficients(4, 4096),
    ),
    Case(
        "mhc_coefficients",
        _mhc_coefficients(3, 133, phi_wide=True, iterations=4, pre_eps=1e-6, sinkhorn_eps=1e-6, res_layout="in_out"),
        "in_out",
        ulps=16.0,
        inside=True,  # a phi wider than x is multiplied in two terms of bf16, or in tf32
        large=_mhc_coefficients(4, 4096, phi_wide=True, pre_eps=1e-6, sinkhorn_eps=1e-6, res_layout="in_out"),
    ),
    Case(
        "mhc_pre",
        _mhc_coefficients(4, 133, groups=1, phi_wide=True),
        ulps=24.0,  # alpha's gradient is one sum of signed terms, of which random incoming gradients cancel a part
        inside=True,
        wrong=_MHC_WRONG,
        large=_mhc_coefficients(4, 4096, groups=1, phi_wide=True),
    ),
]
CASES += [
    Case("mhc_read", _mhc_read(n, 67), f"{n}", wrong=(Wrong("pre-shape", _cut(1), ValueError, "pre has shape"),), large=_mhc_read(n, 4096))
    for n in (3, 4)
]
CASES += [
    Case(
        "mhc_write",
        _mhc_write(n, 67),
        f"{n}",
        wrong=(
            Wrong("y-shape", _cut(1), ValueError, "y has shape"),
            Wrong("post-shape", _cut(2), ValueError, "post has shape"),
            Wrong("mix-shape", _cut(3), ValueError, "mix has shape"),
        ),
        large=_mhc_write(n, 4096),
    )
    for n in (3, 4)
]

# ---- divergences: kl_div, jsd, tvd ----


def _divergence(
    num_classes: int, logs: tuple[bool, bool], *, labels: bool = False, **options: Any
) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Two distributions, each as probabilities or as their logarithms."""

    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        logits = [draw.normal(rows, num_classes, std=2.0) for _ in logs]
        args = tuple(x.log_softmax(-1) if log else x.softmax(-1) for x, log in zip(logits, logs, strict=True))
        return args, {**options, **({"labels": _labels(draw, rows, num_classes)} if labels else {})}

    return make


def _eager_kl_div(log_probs: Tensor, target: Tensor, **options: Any) -> Tensor:
    return torch.nn.functional.kl_div(log_probs.float(), target.float(), reduction="batchmean", **options)


_WRONG_DIVERGENCE = (
    Wrong("target-shape", lambda args, kwargs: args.__setitem__(1, args[1][..., :-1]), ValueError, "target.* has shape"),
    Wrong("target-dtype", lambda args, kwargs: args.__setitem__(1, args[1].long()), TypeError, "target.* has dtype int64"),
    Wrong("no classes", lambda args, kwargs: args.__setitem__(slice(0, 2), [x[:, :0] for x in args]), ValueError, "V >= 1"),
    Wrong("reduction", _set(reduction="average"), ValueError, "reduction is 'average'"),
)
_WRONG_ROW_DIVERGENCE = (
    *_WRONG_DIVERGENCE,
    Wrong("label-shape", lambda args, kwargs: kwargs.update(labels=kwargs["labels"][None]), ValueError, "labels has shape"),
    Wrong("label-dtype", lambda args, kwargs: kwargs.update(labels=kwargs["labels"].float()), TypeError, "labels has dtype float32"),
)
_LOGS, _PROBS, _LARGE = (True, True), (False, False), 128_256
# 8 ulps: the rounding of a log-probability times log2(e) grows with its size, and becomes an error of the probability.
CASES += [
    Case("kl_div", _divergence(53, (True, False)), "", ulps=8.0, wrong=_WRONG_DIVERGENCE, eager=_eager_kl_div,
         large=_divergence(_LARGE, (True, False))),
    Case("kl_div", _divergence(53, _LOGS, log_target=True, reduction="none"), "log-none", ulps=8.0,
         large=_divergence(_LARGE, _LOGS, log_target=True)),
    Case("kl_div", _divergence(53, (True, False), reduction="mean"), "mean", ulps=8.0),
    Case("jsd", _divergence(53, _LOGS, labels=True), "", ulps=8.0, large=_divergence(_LARGE, _LOGS, labels=True),
         wrong=(*_WRONG_ROW_DIVERGENCE, Wrong("beta", _set(beta=1.5), ValueError, "beta is 1.5"))),
    Case("jsd", _divergence(53, _LOGS, labels=True, beta=0.1, reduction="none"), "none", ulps=8.0,
         large=_divergence(_LARGE, _LOGS, beta=0.1, reduction="none")),
    Case("jsd", _divergence(53, _LOGS, labels=True, beta=1.0), "reverse", ulps=8.0, large=_divergence(_LARGE, _LOGS, beta=1.0)),
    Case("jsd", _divergence(53, _LOGS, beta=0.0, reduction="sum"), "forward", ulps=8.0),
    Case("tvd", _divergence(53, _PROBS, labels=True), "", wrong=_WRONG_ROW_DIVERGENCE, large=_divergence(_LARGE, _PROBS)),
    Case("tvd", _divergence(53, _PROBS, reduction="none"), "none"),
]  # fmt: skip


# ---- rows: layer_norm, softmax, sparsemax ----


def _layer_normed(width: int, *, affine: bool = True) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make(draw: Draw, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        parameters = (draw.normal(width, std=0.3, mean=1.0), draw.normal(width)) if affine else ()
        return (draw.normal(rows, width, mean=0.5), *parameters), {"eps": 1e-5}

    return make


def _rows_of(width: int, dim: int = -1, std: float = 1.0) -> Callable[[Draw, int], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Rows of ``width`` along the last of two dimensions, or the middle one of three."""
    return lambda draw, rows: ((draw.normal(*((rows, width) if dim == -1 else (rows, width, 3)), std=std),), {"dim": dim})


CASES += [
    Case(
        "layer_norm",
        _layer_normed(97),
        wrong=(
            Wrong("eps", _set(eps=-1.0), ValueError, "eps is -1.0"),
            Wrong("weight-shape", _cut(1), ValueError, "weight has shape"),
            Wrong("bias-shape", _cut(2), ValueError, "bias has shape"),
            Wrong("bias-dtype", lambda args, kwargs: args.append(args.pop().long()), TypeError, "bias has dtype int64"),
            Wrong("width", lambda args, kwargs: args.__setitem__(0, args[0][:, :0]), ValueError, "x has shape"),
        ),
        eager=lambda x, weight, bias, eps: torch.nn.functional.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps),
        large=_layer_normed(4096),
    ),
    Case("layer_norm", _layer_normed(24, affine=False), "plain", large=_layer_normed(8192)),
    # 8 ulps: torch's own gradient on the CPU forms sum(dy * x) - mean * sum(dy) over the row, two large terms that cancel.
    Case("layer_norm", _layer_normed(16411), "wide", ulps=8.0, rows=(0, 2, 5), large=_layer_normed(16384)),
]
for _op, _eager in (("softmax", torch.nn.functional.softmax), ("sparsemax", None)):
    CASES += [
        Case(
            _op,
            _rows_of(97),
            wrong=(
                Wrong("dim", _set(dim=2), ValueError, "dim is 2"),
                Wrong("dim-type", _set(dim=1.0), TypeError, "dim is 1.0"),
                Wrong("no-dims", lambda args, kwargs: args.__setitem__(0, args[0][0, 0]), ValueError, "x has shape"),
                Wrong("width", lambda args, kwargs: args.__setitem__(0, args[0][:, :0]), ValueError, "x has shape"),
            ),
            eager=_eager,
            large=_rows_of(8192),
        ),
        Case(_op, _rows_of(19, dim=1), "middle", large=_rows_of(64)),
        Case(_op, _rows_of(16411, std=2.0), "wide", rows=(0, 2, 5), large=_rows_of(16384)),
    ]
