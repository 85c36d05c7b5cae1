"""Headers are read as the safetensors library writes them, and broken files are refused."""

import json
import pickle
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from worker.protocol.peft import SafetensorsError, parse_header, read_header

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3, dtype=torch.float16),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_what_the_library_writes_is_read(tmp_path):
    data = save(TENSORS, metadata={"format": "pt"})
    header = parse_header(data)
    assert {name: info.shape for name, info in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    a = header.tensors["a"]
    assert a.dtype == "F32"
    assert struct.unpack("<6f", data[a.start : a.stop]) == (0, 1, 2, 3, 4, 5)
    save_file(TENSORS, tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors") == parse_header(save(TENSORS))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no header"),
        (b"\x00" * 7, "no header"),
        (pickle.dumps({"a": 1}), "pickle"),
        (b"PK\x03\x04" + b"\x00" * 30, "pickle"),
        (struct.pack("<Q", 100) + b"{}", "truncated"),
        (struct.pack("<Q", 1 << 62) + b"{}", "truncated"),
        (with_header(b"{nope"), "not JSON"),
        (with_header(b"\xff\xfe"), "not JSON"),
        (with_header(b"[" * 100_000), "not JSON"),
        (with_header([]), "JSON object"),
        (with_header({"a": 5}), "not an object"),
        (with_header({"a": entry(dtype="F4")}, b"\0" * 8), "unknown dtype"),
        (with_header({"a": entry(dtype=["F32"])}, b"\0" * 8), "unknown dtype"),
        (with_header({"a": entry(shape=(-2,))}, b"\0" * 8), "malformed shape"),
        (with_header({"a": entry(shape=(True, 2))}, b"\0" * 8), "malformed shape"),
        (with_header({"a": entry(offsets=(0, 8, 9))}, b"\0" * 8), "data_offsets"),
        (with_header({"a": entry(offsets=(0, 12))}, b"\0" * 12), "12 bytes for F32"),
        (with_header({"a": entry()}, b"\0" * 7), "truncated"),
        (with_header({"a": entry()}, b"\0" * 9), "trailing"),
        (with_header({"a": entry(), "b": entry()}, b"\0" * 8), "overlap"),
        (with_header({"a": entry(offsets=(4, 12))}, b"\0" * 12), "gap"),
        (with_header(b'{"a": {}, "a": {}}'), "twice"),
    ],
)
def test_a_broken_file_is_refused(data, reason):
    with pytest.raises(SafetensorsError, match=reason):
        parse_header(data)


@given(cut=st.integers(0, len(save(TENSORS)) - 1))
def test_every_truncation_is_noticed(cut):
    with pytest.raises(SafetensorsError):
        parse_header(save(TENSORS)[:cut])


@given(data=st.binary(max_size=200), at=st.integers(0, 400))
def test_arbitrary_bytes_never_raise_anything_else(data, at):
    whole = save(TENSORS)
    for candidate in (data, whole[:at] + data + whole[at + len(data) :]):
        try:
            header = parse_header(candidate)
        except SafetensorsError:
            continue
        assert all(info.stop <= len(candidate) for info in header.tensors.values())
