"""Faults outside the kernels: options that a block drops on the way, and what the decoder does about documents and deferred writes."""

from __future__ import annotations

from .fault import Fault, table


def _parity(*names: str) -> tuple[str, ...]:
    return tuple(f"parity/test_parity.py::test_equals_transformers_in_true_float64[{name}]" for name in names)


def _contract(block: str, check: str) -> tuple[str, ...]:
    return (f"blocks/test_contract.py::test_block_keeps_the_contract_of_its_slot[{block}-{check}]",)


MODEL: list[Fault] = table(
    "blocks/attention.py",
    ("model-window-dropped", "window=config.window,", "window=None,", _parity("mistral")),
    ("model-window-edge", "window=config.window,", "window=config.window and config.window + 1,", _parity("mistral")),
    ("model-scale-dropped", "scale=config.softmax_scale", "scale=None", _parity("gemma2")),
    ("model-attention-softcap-dropped", "softcap=config.softcap", "softcap=None", _parity("gemma2")),
    ("model-documents-dropped", '{"document_ids": ctx.document_ids}', '{"document_ids": None}', _contract("attention", "isolation")),
)
MODEL += table(
    "blocks/head.py",
    ("model-softcap-of-the-loss", "softcap=self.softcap, **options", "softcap=None, **options", _parity("gemma2")),
    (
        "model-softcap-of-the-logits",
        "torch.tanh(logits / self.softcap) * self.softcap\n        return logits",
        "logits * 1.0\n        return logits",
        _parity("gemma2"),
    ),
)
MODEL += table("blocks/norm.py", ("model-offset-dropped", '"offset": config.offset,', '"offset": 0.0,', _parity("gemma")))
MODEL += table(
    "blocks/rope.py",
    ("model-rope-scaling-dropped", "if config.scaling is None:", "if config:", _parity("llama3")),
    (
        "model-rope-attention-factor",
        "cos, sin = angles.cos() * self.factor",
        "cos, sin = angles.cos() / self.factor",
        ("blocks/test_rope.py::test_tables_of_every_scaling_type[yarn-100]",),
    ),
    ("model-rope-ramp-sign", "(1 - smooth) * stretched", "(1 + smooth) * stretched", _parity("llama3")),
)
MODEL += table(
    "blocks/state.py",
    (
        "model-label-of-the-next-document",
        "shifted.masked_fill(ends, -100)",
        "shifted.masked_fill(ends, 0)",
        ("blocks/test_decoder.py::test_the_last_token_of_a_document_predicts_nothing",),
    ),
    (
        "model-positions-of-documents",
        "torch.where(kept, count - first, 0)",
        "torch.where(kept, count + first, 0)",
        ("blocks/test_decoder.py::test_helpers_of_documents",),
    ),
    (
        "model-padding-document",
        "torch.where(attention_mask.bool(), inside, PADDING)",
        "torch.where(attention_mask.bool(), inside, 0)",
        _contract("attention", "isolation"),
    ),
    ("model-labels-not-shifted", "pad(labels[:, 1:], (0, 1), value=-100)", "pad(labels[:, :-1], (1, 0), value=-100)", _parity("llama")),
)
_HIDDEN = ("blocks/test_decoder.py::test_hidden_states_are_the_stream_before_each_layer_and_the_normed_output",)

MODEL += table(
    "blocks/residual.py",
    ("model-settle-drops-the-write", "_, x = _add_and_norm(state.stream, None)", "x, _ = state.stream", _HIDDEN),
    ("model-settle-sign", "x = x + pending", "x = x - pending", _HIDDEN + _parity("llama")),
    ("model-deferred-write-sign", "return norm.add(pending, x)", "return norm.add(-pending, x)", _parity("llama")),
)
MODEL += table(
    "blocks/cache.py",
    (
        "model-cache-window-edge",
        "self.spec.window - 1)\n            if kept",
        "self.spec.window - 2)\n            if kept",
        _contract("windowed attention", "caching"),
    ),
)
