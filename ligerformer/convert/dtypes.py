"""Which dtype a model is loaded in, and dtypes by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from .safetensors_file import Entry

MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(dtype: torch.dtype | str, what: str = "dtype") -> torch.dtype:
    """A dtype that a model may have, out of itself or its name ("bfloat16", "torch.bfloat16"); a ValueError for any other."""
    for known in MODEL_DTYPES:
        if dtype == known or (isinstance(dtype, str) and dtype.removeprefix("torch.") == dtype_name(known)):
            return known
    raise ValueError(f"{what} is {dtype!r}; expected {', '.join(map(dtype_name, MODEL_DTYPES))} (or 'auto', where one is chosen)")


def common_dtype(entries: Iterable[Entry]) -> torch.dtype:
    """The floating dtype that most bytes of these tensors are in; fp32 where there is none."""
    counts: Counter[torch.dtype] = Counter()
    for entry in entries:
        if entry.dtype in MODEL_DTYPES:
            counts[entry.dtype] += entry.num_bytes
    return counts.most_common(1)[0][0] if counts else torch.float32
