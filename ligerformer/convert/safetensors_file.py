"""A strict reader of safetensors files: headers first, then bytes straight into the memory of a parameter.

The format (github.com/huggingface/safetensors): eight bytes with the header's length, little-endian; the header, JSON, a dict of
``name -> {dtype, shape, data_offsets}``; then the data, which the offsets must cover without a gap or an overlap. Everything that a file
can claim is checked against its size before any of it is believed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .errors import CheckpointError, fail

MAX_HEADER_BYTES = 100_000_000  # the format's own bound
STAGING_BYTES = 4 * 1024**2  # what a cast, or a copy to another device, holds at one time
PIECE = 32_760  # elements; torch gives a smaller cast no OpenMP team, which would only stand in the way of the other readers

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
QUANTIZED_BITS = {
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
BITS = {name: dtype.itemsize * 8 for name, dtype in DTYPES.items()} | QUANTIZED_BITS


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype as the format spells it, its shape, and where its bytes start in the file."""

    name: str
    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype, or None for a quantised one, which is not read."""
        return DTYPES.get(self.dtype_name)


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of a safetensors file; a CheckpointError that names the file for anything the format does not allow."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: is {size} bytes long, too short for a safetensors file; it is truncated")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: claims a header of {length} bytes, over the format's {MAX_HEADER_BYTES}; no safetensors file")
        if length > size - 8:
            raise CheckpointError(f"{path}: claims a header of {length} bytes and has {size - 8} after its length; it is truncated")
        header = _parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    problems: list[str] = []
    entries = {}
    for name, fields in header.items():
        entry = _parse_entry(name, fields, path, 8 + length, problems)
        if entry is not None:
            entries[name] = entry
    if not problems:
        problems = _check_layout(list(entries.values()), 8 + length, size)
    fail(problems, str(path))
    return entries


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: a dict, or a ValueError that names a key given twice (of which JSON would keep the last)."""
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        twice = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        raise ValueError(f"names {', '.join(map(repr, dict.fromkeys(twice)))} more than once")
    return data


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is unreadable ({error}); no safetensors file, or a damaged one") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is no dict; no safetensors file")
    return header


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(name: str, fields: Any, path: Path, data_start: int, problems: list[str]) -> Entry | None:
    """The entry of one tensor; None, and a line in ``problems``, where it contradicts itself."""
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        problems.append(f"tensor {name!r}: is {fields!r:.200}; expected dtype, shape and data_offsets")
        return None
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        problems.append(f"tensor {name!r}: unknown dtype {dtype!r:.200}; known: {', '.join(BITS)}")
        return None
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        problems.append(f"tensor {name!r}: shape is {shape!r:.200}; expected a list of sizes")
        return None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)) or offsets[0] > offsets[1]:
        problems.append(f"tensor {name!r}: data_offsets is {offsets!r:.200}; expected [begin, end]")
        return None
    begin, end = offsets
    num_bits = math.prod(shape) * BITS[dtype]
    if num_bits != (end - begin) * 8:
        problems.append(f"tensor {name!r}: {dtype} of shape {shape} takes {num_bits / 8:g} bytes; its data_offsets give it {end - begin}")
        return None
    return Entry(name, path, dtype, tuple(shape), data_start + begin, end - begin)


def _check_layout(entries: list[Entry], data_start: int, size: int) -> list[str]:
    """What is wrong with how the tensors cover the data: gaps, overlaps, bytes past the end of the file or left over."""
    problems = []
    position, previous = data_start, "the header"
    for entry in sorted(entries, key=lambda e: (e.start, e.num_bytes)):
        if entry.start < position:
            problems.append(f"tensor {entry.name!r} overlaps {previous}")
        elif entry.start > position:
            problems.append(f"{entry.start - position} bytes between {previous} and tensor {entry.name!r} belong to no tensor")
        end = entry.start + entry.num_bytes
        if end > size:
            problems.append(f"tensor {entry.name!r} ends at byte {end} and the file has {size}; it is truncated, fetch it again")
        position, previous = max(position, end), f"tensor {entry.name!r}"
    if not problems and position < size:
        problems.append(f"{size - position} bytes after {previous} belong to no tensor")
    return problems


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, writable, as long as ``tensor`` lives."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"memory_of needs a contiguous tensor on the CPU; got one on {tensor.device}, strides {tensor.stride()}")
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


class Reader:
    """Copies tensors from files into parameters; a context manager that keeps one file open at a time.

    Bytes go straight into the parameter where it lies on the CPU, contiguous and in the file's dtype; otherwise through a buffer of
    ``STAGING_BYTES``. Files are read, not mapped: a file that shrinks meanwhile is an error and no crash.
    """

    def __init__(self, staging_bytes: int = STAGING_BYTES) -> None:
        self._staging_bytes = staging_bytes
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._staging: Tensor | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._path = self._file = self._staging = None

    def copy(self, entry: Entry, into: Tensor) -> None:
        """Copy a tensor's values into ``into`` (same shape), casting to its dtype."""
        if entry.dtype is None or tuple(into.shape) != entry.shape:
            raise ValueError(f"{entry.name}: {entry.dtype_name} {list(entry.shape)} cannot be copied into {list(into.shape)}")
        if entry.num_bytes == 0:
            return
        if into.device.type == "cpu" and into.is_contiguous() and into.dtype == entry.dtype:
            self._read(entry, 0, memory_of(into))
        elif into.is_contiguous():
            flat, done, on_cpu = into.view(-1), 0, into.device.type == "cpu"
            for chunk in self.chunks(entry, pinned=into.device.type == "cuda"):
                place = flat[done : done + chunk.numel()]
                for target, values in zip(place.split(PIECE), chunk.split(PIECE)) if on_cpu else [(place, chunk)]:
                    target.copy_(values)
                done += chunk.numel()
        else:
            whole = torch.empty(entry.shape, dtype=entry.dtype)
            self._read(entry, 0, memory_of(whole))
            into.copy_(whole)

    def chunks(self, entry: Entry, *, elements: int | None = None, pinned: bool = False) -> Iterator[Tensor]:
        """The tensor's values, flat, at most ``elements`` at a time, in one reused buffer (a piece is valid until the next)."""
        assert entry.dtype is not None
        if self._staging is None:
            self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=pinned)
        width = entry.dtype.itemsize
        step = self._staging_bytes // width * width if elements is None else elements * width
        for offset in range(0, entry.num_bytes, step):
            piece = self._staging[: min(step, entry.num_bytes - offset)]
            self._read(entry, offset, memory_of(piece))
            yield piece.view(entry.dtype)

    def _read(self, entry: Entry, offset: int, memory: memoryview) -> None:
        if self._path != entry.file:
            if self._file is not None:
                self._file.close()
            self._file, self._path = entry.file.open("rb", buffering=0), entry.file
        assert self._file is not None
        self._file.seek(entry.start + offset)
        done = 0
        while done < len(memory):  # one read gives at most 2 GiB
            count = self._file.readinto(memory[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{entry.file}: ended inside tensor {entry.name!r} while it was read; did something write to it?")
            done += count


def same_values(first: Entry, second: Entry) -> bool:
    """Whether two tensors hold the same numbers, compared a piece at a time."""
    if first.shape != second.shape:
        return False
    elements = STAGING_BYTES // 8
    with Reader() as one, Reader() as two:
        for a, b in zip(one.chunks(first, elements=elements), two.chunks(second, elements=elements), strict=True):
            same_bits = a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            if not same_bits and not torch.equal(a.double(), b.double()):
                return False
    return True
