"""The digest: golden values, three implementations of one definition, and the changes it must detect."""

from __future__ import annotations

import struct

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshplan import kernel
from meshplan.kernel import _digest, digest_table
from meshplan.kernel._digest import digest_words
from meshplan.replicas import digest
from meshplan.testing import order_sensitive

MASK = (1 << 64) - 1
needs_library = pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))


def signed(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def random(n: int) -> int:
    return mix((n + 1) * 0x9E3779B97F4A7C15 & MASK)


KEYS = [[random(256 * lane + word) >> 32 for word in range(256)] for lane in range(2)]


def defined(data: bytes, first: int = 0) -> list[int]:
    """The sums over blocks, in Python integers, by the definition."""
    sums = [0, 0]
    data += bytes(-len(data) % 1024)
    for start in range(0, len(data), 1024):
        words = struct.unpack("<256I", data[start : start + 1024])
        for lane, keys in enumerate(KEYS):
            keyed = [(word + key) % 2**32 for word, key in zip(words, keys, strict=True)]
            pairs = zip(keyed[::2], keyed[1::2], strict=True)
            found = sum(a * b for a, b in pairs) & MASK
            sums[lane] += mix(found ^ random(2**32 + 2 * (first + start // 1024) + lane))
    return [signed(one & MASK) for one in sums]


def plain(tensor: Tensor) -> list[int]:
    """By plain torch, dtype and shape included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_digest, "available", lambda: False)
        return [int(word) for word in digest_words(tensor)]


def test_golden_digests() -> None:
    """They are stored in logs and with checkpoints, and never change."""
    numbers = torch.arange(70001) * 2654435761
    tensors = {
        "float32[]": torch.tensor(1.0),
        "float32[0]": torch.empty(0),
        "float32[0,3]": torch.empty(0, 3),
        "float32[2] of 0.0": torch.zeros(2),
        "float32[2] of -0.0": -torch.zeros(2),
        "bool[3]": torch.tensor([True, False, True]),
        "int64[1000]": torch.arange(1000),
        "float32[10,100]": torch.arange(1000.0).view(10, 100),
        "float32[100,10]": torch.arange(1000.0).view(10, 100).t(),
        "bfloat16[70001]": (numbers % 65536 - 32768).to(torch.int16).view(torch.bfloat16),
        "float64[70001]": (numbers * numbers).view(torch.float64),
        # Of several streams.
        "float64[110001]": (torch.arange(110001) * 2654435761).view(torch.float64),
        "complex128[2]": torch.tensor([1 + 2j, -1j], dtype=torch.complex128),
        "float8_e4m3fn[5]": torch.arange(5.0).to(torch.float8_e4m3fn),
    }
    assert_expected_inline(
        "\n".join(f"{digest(t)} {name}" for name, t in tensors.items()),
        """\
b988fcdf3e0f65df8a16394bbf299e72 float32[]
b6c1011266b5a5b0b030d8ad03bc12d7 float32[0]
9ee1ea48e3e5cfd59ecc08b31de89f56 float32[0,3]
c7d97aaa00ed184f181c2b5a68a44355 float32[2] of 0.0
87723f7b8e3b3249e0dd53128d3a9e27 float32[2] of -0.0
70e561dc8adb6894b3275a963f7723d9 bool[3]
c7ea9d062412a27ec391297e7b00a00b int64[1000]
61cf568c78d844e2f1770b24a2d10349 float32[10,100]
e686f04433004b499732c08e7404f89c float32[100,10]
c8e57fbefcb015f063443d90a3b9df87 bfloat16[70001]
fb42dda55e7033b3f3357e2efb204a40 float64[70001]
d236b777816c3e10fcfc0885b24c9fdf float64[110001]
486e9737643222d99524832cb694c32f complex128[2]
c9766d78b4507b88c5057918963d9f19 float8_e4m3fn[5]""",
    )


@given(st.binary(max_size=5000), st.sampled_from([1, 2, 4, 8]))
def test_all_implementations_agree(data: bytes, size: int) -> None:
    data = data[: len(data) // size * size]
    raw = torch.tensor([*data], dtype=torch.uint8)
    tensor = raw.view({1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}[size])
    head = _digest._head(tensor.dtype, tuple(tensor.shape))
    expected = [signed(a + b) for a, b in zip(defined(data), head, strict=True)]
    assert plain(tensor) == expected
    assert [int(word) for word in digest_words(tensor)] == expected


@given(
    st.integers(0, 210_000),  # of 4 bytes: several streams
    st.integers(0, 9),
    st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64]),
    st.integers(0, 1 << 30),
)
def test_compiled_and_plain_agree_at_any_size_and_address(
    numel: int, offset: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    nbytes = (numel + offset) * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype)[offset:]
    assert plain(tensor) == digest_words(tensor).tolist() == digest_words(tensor.clone()).tolist()


@needs_library
@given(st.integers(0, 1 << 45), st.integers(1, 3000))
def test_blocks_are_keyed_by_position(first: int, nbytes: int) -> None:
    data = (torch.arange(nbytes) * 37 % 251).to(torch.uint8)
    sums = (_digest.ctypes.c_longlong * 2)()
    _digest.library().mp_digest(data.data_ptr(), nbytes, first, sums)
    assert (
        list(sums) == _digest._plain(data, first).tolist() == defined(bytes(data.tolist()), first)
    )


def test_digest_does_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    base = order_sensitive(300 * 700, rank=0, world_size=2).view(300, 700)
    expected = digest_words(base.t().contiguous()).tolist()
    assert plain(base.t()) == expected
    for size in (1024, 3072, 1 << 16):
        for name in ("_COPIED_BYTES", "_CPU_PIECE_BYTES"):
            monkeypatch.setattr(_digest, name, size)
        assert digest_words(base.t()).tolist() == plain(base.t()) == expected
        assert plain(base.t().contiguous()) == expected


@given(st.integers(0, 4095), st.integers(0, 31), st.integers(0, 1 << 30))
def test_any_flipped_bit_changes_the_digest(word: int, bit: int, seed: int) -> None:
    tensor = torch.randint(0, 2**31, (4096,), generator=torch.Generator().manual_seed(seed))
    tensor = tensor.to(torch.int32)
    before = digest_words(tensor)
    tensor[word] ^= -(2**31) if bit == 31 else 1 << bit
    assert digest_words(tensor).tolist() != before.tolist()


def test_dtype_and_shape_are_part_of_it() -> None:
    data = torch.zeros(12, dtype=torch.uint8)
    views = [
        data,
        data.view(3, 4),
        data.view(4, 3),
        data.view(12, 1),
        data[:0],
        data[:0].view(0, 1),
    ]
    views += [data.view(dtype) for dtype in (torch.int8, torch.bool, torch.int32, torch.float32)]
    assert len({digest(view) for view in views}) == len(views)


DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_torch_dtype_has_a_digest(dtype: torch.dtype) -> None:
    raw = torch.arange(1600).to(torch.uint8).view(dtype)
    assert plain(raw) == digest_words(raw).tolist()
    # Not at an address that a wider element could have.
    assert plain(raw[1:]) == digest_words(raw[1:]).tolist() != digest_words(raw[:-1]).tolist()
    assert digest_words(raw[0]).tolist() != digest_words(raw[1]).tolist()


@needs_library
def test_more_than_2_to_the_31_elements_have_a_digest() -> None:
    """Zeros at one address, so that all blocks have one hash."""
    numel = (1 << 31) + 1025
    tensor = torch.zeros(1, dtype=torch.uint8).expand(numel)
    blocks = torch.arange(-(-numel // 1024))
    hashes = _digest._hashes(torch.zeros(1024, dtype=torch.uint8))
    numbers = 2 * blocks[:, None] + torch.tensor([1, 2]) + (1 << 32)
    terms = _digest.mixed(hashes ^ _digest.mixed(numbers * _digest._GOLDEN))
    expected = torch.tensor(_digest._head(torch.uint8, (numel,))) + terms.sum(0)
    assert digest_words(tensor).tolist() == expected.tolist()


def test_digest_table_matches_single_digests() -> None:
    tensors = [torch.arange(5), torch.ones(3, 3).t(), torch.tensor(1j)]
    expected = [digest_words(tensor).tolist() for tensor in tensors]
    assert digest_table(tensors).tolist() == expected
    assert digest_table([]).shape == (0, 2)
    with torch.device("meta"):
        assert digest_table(tensors).tolist() == expected
    with torch.inference_mode():
        assert [plain(tensor) for tensor in tensors] == expected
    assert [plain(tensor) for tensor in tensors] == expected
