"""The reader: what the format forbids is refused by name, and what it allows is copied bit for bit."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ligerformer.convert import safetensors_file
from ligerformer.convert.errors import CheckpointError
from ligerformer.convert.folder import INDEX, WEIGHTS, find_tensors, member, read_index, read_json
from ligerformer.convert.safetensors_file import Reader, read_header, same_values


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def f32(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_copies_what_the_library_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(7, 3).mul(3).to(dtype), "b": torch.randn(5).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    tensors["empty"] = torch.empty(0, 4, dtype=dtype)
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "m.safetensors")
    assert set(entries) == set(tensors)
    with Reader() as reader:
        for name, tensor in tensors.items():
            into = torch.zeros_like(tensor)
            reader.copy(entries[name], into)
            assert torch.equal(into, tensor)


@pytest.mark.parametrize("staging", [32, 16 * 1024**2])
def test_casts_and_strides_go_through_a_small_buffer(tmp_path: Path, staging: int) -> None:
    tensor = torch.randn(11, 3)
    save_file({"a": tensor}, tmp_path / "m.safetensors")
    entry = read_header(tmp_path / "m.safetensors")["a"]
    with Reader(staging) as reader:
        cast = torch.empty(11, 3, dtype=torch.bfloat16)
        reader.copy(entry, cast)
        assert torch.equal(cast, tensor.bfloat16())
        strided = torch.empty(3, 11).t()
        reader.copy(entry, strided)
        assert torch.equal(strided, tensor)


def test_tensors_at_odd_offsets_are_read(tmp_path: Path) -> None:
    values = torch.randn(3)
    header = {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": f32([3], 1, 13)}
    path = write(tmp_path / "m", header, b"\1" + bytes(safetensors_file.memory_of(values)))
    into = torch.empty(3)
    with Reader() as reader:
        reader.copy(read_header(path)["a"], into)
    assert torch.equal(into, values)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": f32([2], 0, 8)}, b"\0" * 7, "tensor 'a' ends at byte .* truncated"),
        ({"a": f32([2], 0, 8)}, b"\0" * 9, "1 bytes after tensor 'a' belong to no tensor"),
        ({"a": f32([2], 0, 8), "b": f32([2], 4, 12)}, b"\0" * 12, "tensor 'b' overlaps tensor 'a'"),
        ({"a": f32([2], 0, 8), "b": f32([2], 0, 8)}, b"\0" * 8, "overlaps"),
        ({"a": f32([2], 0, 8), "b": f32([1], 12, 16)}, b"\0" * 16, "4 bytes between tensor 'a' and tensor 'b'"),
        ({"a": f32([2], 4, 12)}, b"\0" * 12, "4 bytes between the header and tensor 'a'"),
        ({"a": f32([2], 0, 2**62)}, b"\0" * 8, r"F32 of shape \[2\] takes 8 bytes; its data_offsets give it 4611686018427387904"),
        ({"a": f32([2**40, 2**40], 0, 8)}, b"\0" * 8, "takes .* bytes"),
        ({"a": f32([3], 0, 8)}, b"\0" * 8, "takes 12 bytes; its data_offsets give it 8"),
        ({"a": f32([-2], 0, 8)}, b"\0" * 8, "expected a list of sizes"),
        ({"a": f32([True], 0, 4)}, b"\0" * 4, "expected a list of sizes"),
        ({"a": f32([2], 8, 0)}, b"\0" * 8, r"expected \[begin, end\]"),
        ({"a": f32([2], -8, 0)}, b"\0" * 8, r"expected \[begin, end\]"),
        ({"a": {"dtype": "F128", "shape": [1], "data_offsets": [0, 16]}}, b"\0" * 16, "unknown dtype 'F128'"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", "expected dtype, shape and data_offsets"),
        ({"a": f32([1], 0, 4) | {"extra": 1}}, b"\0" * 4, "expected dtype, shape and data_offsets"),
        ({"a": 3}, b"", "expected dtype, shape and data_offsets"),
        ([1, 2], b"", "its header is no dict"),
        (b"not json", b"", "its header is unreadable"),
        (b"\xff\xfe{}", b"", "its header is unreadable"),
        (b"[" * 100_000, b"", "its header is unreadable"),
        (b'{"a": 1, "b": 2, "a": 3}', b"", "names 'a' more than once"),
    ],
)
def test_lying_files_are_refused_by_name(tmp_path: Path, header: Any, data: bytes, words: str) -> None:
    path = write(tmp_path / "m.safetensors", header, data)
    with pytest.raises(CheckpointError, match=words) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_a_header_longer_than_the_file_or_the_format_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(write(tmp_path / "a", {}, length=1000))
    with pytest.raises(CheckpointError, match="over the format's 100000000"):
        read_header(write(tmp_path / "b", {}, length=2**63))
    (tmp_path / "c").write_bytes(b"\0\0")
    with pytest.raises(CheckpointError, match="2 bytes long, too short"):
        read_header(tmp_path / "c")


def test_every_cut_of_a_good_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.randn(2, 3), "b": torch.randn(4)}, tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(tmp_path / "cut")


def test_quantised_tensors_are_listed_and_not_read(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "b": {"dtype": "F4", "shape": [4], "data_offsets": [4, 6]}}
    entries = read_header(write(tmp_path / "m", header, b"\0" * 6))
    assert entries["a"].dtype is None and entries["b"].dtype_name == "F4"


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.randn(64)}, tmp_path / "m.safetensors")
    entry = read_header(tmp_path / "m.safetensors")["a"]
    with (tmp_path / "m.safetensors").open("r+b") as file:
        file.truncate(entry.start + 40)
    with Reader() as reader, pytest.raises(CheckpointError, match="ended inside tensor 'a'"):
        reader.copy(entry, torch.empty(64))


def test_same_values_compares_numbers_not_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "STAGING_BYTES", 64)
    a = torch.randn(30).bfloat16().float()
    b = a.clone()
    b[-1] += 1
    save_file({"a": a, "same": a.clone(), "other": b, "low": a.bfloat16(), "lower": b.bfloat16()}, tmp_path / "m.safetensors")
    e = read_header(tmp_path / "m.safetensors")
    assert same_values(e["a"], e["same"]) and same_values(e["a"], e["low"])
    assert not same_values(e["a"], e["other"]) and not same_values(e["a"], e["lower"])


# Folders and indices.


def sharded(folder: Path, index: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "one.safetensors")
    save_file({"c": torch.ones(4)}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"} if index is None else index
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    entries = find_tensors(sharded(tmp_path / "m"))
    assert {n: e.file.name for n, e in entries.items()} == {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}


def test_everything_that_index_and_files_disagree_on_is_in_one_error(tmp_path: Path) -> None:
    index = {"a": "one.safetensors", "c": "one.safetensors", "d": "two.safetensors", "e": "three.safetensors"}
    with pytest.raises(CheckpointError) as error:
        find_tensors(sharded(tmp_path / "m", index))
    text = str(error.value)
    assert "three.safetensors is missing; the index says that it holds 1 tensors" in text
    assert "tensor 'b' of one.safetensors is not in the index" in text
    assert "tensor 'c' is in two.safetensors; the index says one.safetensors" in text
    assert "tensor 'c' is not in one.safetensors" in text
    assert "tensor 'd' is not in two.safetensors" in text


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    save_file({"c": torch.ones(4), "a": torch.zeros(2)}, folder / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a' stands in both one.safetensors and two.safetensors"):
        find_tensors(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "", "..", "C:x"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is no plain file name"):
        find_tensors(sharded(tmp_path / "m", {"a": name}))


def test_links_stay_inside_the_folder_or_in_the_hubs_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "blob")
    (snapshot / WEIGHTS).symlink_to("../../blobs/blob")
    assert set(find_tensors(snapshot)) == {"a"}
    save_file({"a": torch.ones(2)}, tmp_path / "secret")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"is a link to .*secret, outside"):
        find_tensors(snapshot)
    whole = tmp_path / "link"
    whole.symlink_to(sharded(tmp_path / "m"))
    assert len(find_tensors(whole)) == 3
    assert member(whole, "one.safetensors").exists()


def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="only safetensors is read"):
        find_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        read_index(sharded(tmp_path / "m", {"a": "pytorch_model.bin"}))


def test_a_folder_without_weights_or_index_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        find_tensors(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="without an index"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1, "a": 2}', '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{}"])
def test_damaged_indices_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        read_index(tmp_path)


def test_missing_json_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"config.json is missing; the folder holds other.txt"):
        read_json(tmp_path / "config.json")
