"""Faults in the kernels of hyper-connections."""

from __future__ import annotations

from .fault import Fault, precision, table

_OUT_IN, _IN_OUT, _PRE = precision("mhc_coefficients"), precision("mhc_coefficients-in_out"), precision("mhc_pre")
_PUBLISHED = ("kernels/test_mhc.py::test_kernels_against_fp64[float32-published-3]",)

MHC: list[Fault] = table(
    "kernels/mhc_coefficients_triton.py",
    ("mhc-project-sign", "product = _dot(x, phi", "product = _dot(-x, phi", _OUT_IN + _PRE),
    ("mhc-project-squares-sign", "squares += wide * wide", "squares -= wide * wide", _PRE),
    (
        "mhc-project-last-column",
        "column_mask = columns < hidden_size\n        x",
        "column_mask = columns < hidden_size - 1\n        x",
        _PRE,
    ),
    (
        "mhc-project-last-coefficient",
        "mask=column_mask[:, None] & (k < K)[None, :], other=0.0)\n        product",
        "mask=column_mask[:, None] & (k < K - 1)[None, :], other=0.0)\n        product",
        _PRE,
    ),
    (
        "mhc-project-last-step",
        "tl.minimum(first + steps_per_split, N * column_blocks)",
        "tl.minimum(first + steps_per_split, N * column_blocks - 1)",
        _PRE,
    ),
    ("mhc-splits", "for _ in range(1, splits)", "for _ in range(2, splits)", ("kernels/test_mhc.py::test_ragged_sizes[66-2-257]",)),
    ("mhc-layout", "(into * N + out if IN_OUT else out * N + into)", "(out * N + into if IN_OUT else into * N + out)", _OUT_IN + _IN_OUT),
    ("mhc-finish-pre-sign", "pre = tl.sigmoid(tl.load", "pre = tl.sigmoid(-tl.load", _PRE),
    ("mhc-finish-post-sign", "post = 2.0 *", "post = -2.0 *", _OUT_IN),
    ("mhc-finish-logits-sign", "* m + bias\n        _, mix, _", "* m - bias\n        _, mix, _", _OUT_IN),
    ("mhc-finish-last-entry", "(out < N) & (into < N)", "(out < N) & (into < N - 1)", _OUT_IN),
    ("mhc-finish-last-stream", "return i, i < N,", "return i, i < N - 1,", _PRE),
    ("mhc-sinkhorn-rows-first", "return mix / rows[:, :, None], columns", "return mix / rows[:, None, :], columns", _OUT_IN),
    ("mhc-sinkhorn-eps-sign", "columns + sinkhorn_eps, 0.0", "columns - sinkhorn_eps, 0.0", _PUBLISHED),
    ("mhc-finish-iterations", "for _ in range(ITERATIONS - 1)", "for _ in range(ITERATIONS)", _OUT_IN + _IN_OUT),
    ("mhc-finish-backward-sign", "gate * (1.0 - gate)", "gate * (1.0 + gate)", _PRE + _OUT_IN),
    ("mhc-finish-backward-edge", "m_ptr + flat + offset, mask=mask,", "m_ptr + flat + offset, mask=mask & (i < N - 1),", _PRE),
    ("mhc-finish-backward-radial-sign", "-rstd * rstd * inner", "rstd * rstd * inner", _PRE),
    ("mhc-sinkhorn-backward-rows-sign", "(grad - tl.sum(grad * mix, axis=2)", "(grad + tl.sum(grad * mix, axis=2)", _OUT_IN),
    ("mhc-sinkhorn-backward-columns-sign", "(grad - tl.sum(grad * mix, axis=1)", "(grad + tl.sum(grad * mix, axis=1)", _OUT_IN),
    ("mhc-sinkhorn-backward-restored", "mix = mix * columns[:, None, :]", "mix = mix / columns[:, None, :]", _OUT_IN),
    ("mhc-sinkhorn-backward-first-step", "step = ITERATIONS - 2 - back", "step = back", _OUT_IN),
    ("mhc-sinkhorn-backward-log-sign", "grad - softmax * tl.sum(grad", "grad + softmax * tl.sum(grad", _OUT_IN),
    ("mhc-sinkhorn-backward-start-sign", "softmax * (grad - tl.sum(", "softmax * (grad + tl.sum(", _IN_OUT),
    ("mhc-project-backward-sign", "x.to(tl.float32) * radial", "x.to(tl.float32) * -radial", _PRE),
    ("mhc-project-backward-last-token", "row_mask = rows < last", "row_mask = rows < last - 1", _PRE),
    (
        "mhc-project-backward-last-column",
        "column_mask = columns < hidden_size\n    x_columns",
        "column_mask = columns < hidden_size - 1\n    x_columns",
        _PRE,
    ),
    (
        "mhc-project-backward-last-coefficient",
        "row_mask[:, None] & (k < K)[None, :], other=0.0)\n        x = ",
        "row_mask[:, None] & (k < K - 1)[None, :], other=0.0)\n        x = ",
        _PRE,
    ),
)

_READ, _WRITE = precision("mhc_read-3"), precision("mhc_write-3")

MHC += table(
    "kernels/mhc_stream.py",
    ("mhc-read-forward-sign", "tl.sum(pre * x, axis=0)", "tl.sum(-pre * x, axis=0)", _READ),
    ("mhc-read-forward-last-stream", "streams < N)\n    tl.store(out_ptr", "streams < N - 1)\n    tl.store(out_ptr", _READ),
    ("mhc-read-forward-edge", "(streams < N) & (columns < hidden_size))\n", "(streams < N) & (columns < hidden_size - 1))\n", _READ),
    ("mhc-read-backward-sign", "pre * grad, mask=mask)", "-pre * grad, mask=mask)", _READ),
    ("mhc-read-backward-coefficient-sign", "products += grad *", "products -= grad *", _READ),
    (
        "mhc-read-backward-edge",
        "grad_token_stride + columns, columns < hidden_size)",
        "grad_token_stride + columns, columns < hidden_size - 1)",
        _READ,
    ),
    ("mhc-write-forward-sign", "total = post * y + tl.sum(", "total = post * y - tl.sum(", _WRITE),
    (
        "mhc-write-forward-edge",
        "column_mask = columns < hidden_size\n    streams",
        "column_mask = columns < hidden_size - 1\n    streams",
        _WRITE,
    ),
    (
        "mhc-write-forward-transposed",
        "mix_ptr + (token * N + out) * N + streams, streams < N)",
        "mix_ptr + (token * N + streams) * N + out, streams < N)",
        _WRITE,
    ),
    (
        "mhc-write-forward-last-stream",
        "(token * N + out) * N + streams, streams < N)",
        "(token * N + out) * N + streams, streams < N - 1)",
        _WRITE,
    ),
    ("mhc-write-backward-sign", "dmix += grad", "dmix -= grad", _WRITE),
    ("mhc-write-backward-mix-transposed", "grad[:, None, :] * x[None, :, :]", "x[:, None, :] * grad[None, :, :]", _WRITE),
    ("mhc-write-backward-post-sign", "dpost += grad", "dpost -= grad", _WRITE),
    (
        "mhc-write-backward-edge",
        "column_mask = columns < hidden_size\n        mask",
        "column_mask = columns < hidden_size - 1\n        mask",
        _WRITE,
    ),
    (
        "mhc-write-backward-transposed",
        "mix_ptr + (token * N + streams) * N + into, streams < N)",
        "mix_ptr + (token * N + into) * N + streams, streams < N)",
        _WRITE,
    ),
    (
        "mhc-write-backward-last-stream",
        "(token * N + streams) * N + into, streams < N)",
        "(token * N + streams) * N + into, streams < N - 1)",
        _WRITE,
    ),
)
