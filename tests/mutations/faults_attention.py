"""Faults in attention: its kernels, how they are launched, and the mask of the reference.

Tiles are 16 x 16 in these tests. The sharp edges (off by one, in whole tiles) need windows and slots that end on a tile's edge.
"""

from __future__ import annotations

from .fault import Fault, table


def _grid(*labels: str) -> tuple[str, ...]:
    return tuple(f"kernels/test_attention.py::test_triton_is_the_reference[{label}]" for label in labels)


def _formula(*labels: str) -> tuple[str, ...]:
    return tuple(f"kernels/test_attention.py::test_reference_is_the_formula[{label}]" for label in labels)


_CAUSAL, _SOFTCAP, _DOCUMENTS, _ONE_QUERY = _grid("causal"), _grid("softcap"), _grid("documents"), _grid("one query")
_TWO, _THIRTY_ONE = _grid("window of two"), _grid("window of two tiles less one")

ATTENTION: list[Fault] = table(
    "kernels/attention_common.py",
    ("attention-causal-edge", "(keys <= slots)", "(keys < slots)", _CAUSAL),
    (
        "attention-window-edge",
        "slots - keys < window",
        "slots - keys <= window",
        (*_grid("window"), "kernels/test_attention.py::test_window_edge_is_exact[4-triton]"),
    ),
    (
        "attention-documents-sign",
        "(query_ids == key_ids)",
        "(query_ids >= key_ids)",
        (*_DOCUMENTS, "kernels/test_attention.py::test_documents_are_isolated_bit_for_bit[in order-triton]"),
    ),
    ("attention-length-edge", "(keys < kv_end) & (slots", "(keys <= kv_end) & (slots", _grid("full", "cross, partly filled")),
    ("attention-last-key", "tl.minimum(end, high_slot + 1)", "tl.minimum(end, high_slot)", _CAUSAL),
    ("attention-first-key", "low_slot - window + 1, 0)", "low_slot - window + 2, 0)", _TWO),
    ("attention-full-tiles-causal", "(low_slot + 1) // BLOCK_N", "(low_slot + 2) // BLOCK_N", _grid("cached, a key short of a tile")),
    (
        "attention-full-tiles-window",
        "tl.maximum(high_slot - window + 1, 0), BLOCK_N)",
        "tl.maximum(high_slot - window, 0), BLOCK_N)",
        _THIRTY_ONE,
    ),
    ("attention-gap-edge", "(step >= gap_first, gap_end", "(step > gap_first, gap_end", _grid("causal")),
    ("attention-tanh-sign", "y = 1.0 - 2.0 / (", "y = 1.0 + 2.0 / (", _SOFTCAP),
    ("attention-tanh-series-sign", "x * (1.0 + x2 *", "x * (1.0 - x2 *", _SOFTCAP),
)

ATTENTION += table(
    "kernels/attention_forward.py",
    ("attention-forward-sign", "scores * factor - base[:, None]", "scores * factor + base[:, None]", _CAUSAL),
    ("attention-forward-decay", "acc * decay[:, None], input", "acc / decay[:, None], input", _CAUSAL),
    ("attention-forward-edge", "dims_ok = dims < HEAD_DIM\n\n    q_ptr", "dims_ok = dims < HEAD_DIM - 1\n\n    q_ptr", _CAUSAL),
    ("attention-forward-head", "kv_head = head // (NUM_HEADS // NUM_KV_HEADS)", "kv_head = head % NUM_KV_HEADS", _grid("grouped")),
    ("attention-sink-sign", "top = tl.load(sinks_ptr", "top = -tl.load(sinks_ptr", _grid("sinks", "one query, sinks")),
    ("attention-sink-of-one-split", "tl.where(split == 0, top", "tl.where(split >= 0, top", _grid("one query, sinks")),
    ("attention-split-edge", "tl.minimum(end, first + share)", "tl.minimum(end, first + share + 1)", _ONE_QUERY),
    ("attention-combine-sign", "weight = tl.exp2(lse - base)", "weight = tl.exp2(lse + base)", _ONE_QUERY),
    ("attention-combine-edge", "dims_ok = dims < HEAD_DIM\n    query = ", "dims_ok = dims < HEAD_DIM - 1\n    query = ", _ONE_QUERY),
    ("attention-ranges-last", "tl.where(within, columns + 1, 0)", "tl.where(within, columns, 0)", _DOCUMENTS),
    ("attention-ranges-least", "(column_ids >= least)", "(column_ids > least)", _grid("all")),
    ("attention-ranges-edge", "columns_ok = columns < num_columns", "columns_ok = columns < num_columns - 1", _DOCUMENTS),
)

ATTENTION += table(
    "kernels/attention_backward.py",
    ("attention-delta-sign", "tl.sum(out * d_out, 1)", "tl.sum(-out * d_out, 1)", _CAUSAL),
    ("attention-delta-edge", "(dims < HEAD_DIM)[None, :]", "(dims < HEAD_DIM - 1)[None, :]", _CAUSAL),
    ("attention-dkdv-sign", "(-delta[None, :], p", "(delta[None, :], p", _CAUSAL),
    ("attention-dkdv-softcap-sign", "(1.0 - scores * scores)\n            dk", "(1.0 + scores * scores)\n            dk", _SOFTCAP),
    ("attention-dkdv-scale", "dk * scale, 0.0)", "dk / scale, 0.0)", _CAUSAL),
    (
        "attention-dkdv-last-query",
        "queries_ok = queries < num_queries\n        q = ",
        "queries_ok = queries < num_queries - 1\n        q = ",
        _CAUSAL,
    ),
    ("attention-dkdv-last-key", "keys_ok = keys < kv_end\n    dims", "keys_ok = keys < kv_end - 1\n    dims", _CAUSAL),
    ("attention-dkdv-causal-end", "query_start + num_queries)", "query_start + num_queries - 1)", _CAUSAL),
    (
        "attention-dkdv-first-query",
        "tl.maximum(low_key - query_start, 0)",
        "tl.maximum(low_key - query_start + 1, 0)",
        _grid("cached, a key past a tile"),
    ),
    (
        "attention-dkdv-full-causal",
        "low_key + BLOCK_N - 1 - query_start",
        "low_key + BLOCK_N - 2 - query_start",
        _grid("cached, a key short of a tile"),
    ),
    ("attention-dkdv-tiles", "first + step // GROUP * BLOCK_M", "step // GROUP * BLOCK_M", _CAUSAL),
    ("attention-dkdv-window-end", "kv_end) - 1 + window", "kv_end) - 2 + window", _TWO),
    ("attention-dkdv-full-window", "(low_key + window - query_start)", "(low_key + window + 1 - query_start)", _THIRTY_ONE),
    ("attention-dkdv-group", "member = step % GROUP", "member = step // GROUP % GROUP", _grid("grouped")),
    ("attention-dq-sign", "(dp - delta[:, None])", "(dp + delta[:, None])", _CAUSAL),
    ("attention-dq-softcap-sign", "(1.0 - scores * scores)\n        dq", "(1.0 + scores * scores)\n        dq", _SOFTCAP),
    ("attention-dq-scale", "(dq * scale)", "(dq / scale)", _CAUSAL),
    (
        "attention-dq-last-query",
        "queries_ok = queries < num_queries\n    dims",
        "queries_ok = queries < num_queries - 1\n    dims",
        _CAUSAL,
    ),
    ("attention-dq-last-key", "keys_ok = keys < kv_end\n        k = ", "keys_ok = keys < kv_end - 1\n        k = ", _CAUSAL),
)

ATTENTION += table(
    "kernels/attention_triton.py",
    ("attention-sinks-gradient-sign", "-(share * delta)", "(share * delta)", _grid("sinks")),
    ("attention-score-factor", "(m.scale / m.softcap, m.softcap * LOG2E)", "(m.scale * m.softcap, m.softcap * LOG2E)", _SOFTCAP),
)

ATTENTION += table(
    "kernels/attention.py",
    ("reference-causal-edge", "(keys <= slots)", "(keys < slots)", _formula("causal", "cached")),
    ("reference-window-edge", "(slots - keys < window)", "(slots - keys <= window)", _formula("window", "cached window")),
    ("reference-documents-sign", "(document_ids[:, :, None] == key", "(document_ids[:, :, None] >= key", _formula("documents")),
    ("reference-length-edge", "(keys < kv_length)", "(keys <= kv_length)", _formula("kv_length", "cross, partly filled")),
    ("reference-softcap", "softcap * torch.tanh(scores / softcap)", "softcap * torch.tanh(scores * softcap)", _formula("softcap")),
    ("reference-sink-sign", "total + torch.exp(sink - top)", "total - torch.exp(sink - top)", _formula("sinks")),
    (
        "attention-window-dropped",
        "q.shape[1] <= window:",
        "q.shape[1] <= window + 1:",
        _formula("window short of one") + _grid("window short of one"),
    ),
    (
        "sdpa-window-first-key",
        'start - masks["window"] + 1)',
        'start - masks["window"] + 2)',
        ("kernels/test_attention.py::test_sdpa_is_the_formula[cached window]",),
    ),
)
