"""The hash of bits against its definition in plain Python, and that no flip of one bit leaves it as it was."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moefold.train.fault_tolerance.state_hash import BLOCK, GOLDEN, BitHash, splitmix64

MODULUS = 2**64


def hash_reference(data: bytes) -> int:
    """h = sum of w[i] * c[i mod B] * d(i div B) modulo 2^64, with the words of the bytes in little endian."""
    data += b"\0" * (-len(data) % 8)
    total = 0
    for i in range(len(data) // 8):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        total += word * (splitmix64(i % BLOCK) | 1) * (2 * (i // BLOCK) * GOLDEN + 1)
    return total % MODULUS


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_splitmix64_is_the_published_generator() -> None:
    """The first outputs of seed 0, as in the tables of Java's SplittableRandom and of xoshiro's authors."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [splitmix64(index) for index in range(4)] == expected


@pytest.mark.parametrize("size", [0, 7, BLOCK + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_the_hash_is_its_definition(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size + 3, generator=torch.Generator().manual_seed(size)).mul(100).to(dtype)
    for part in (tensor[:size], tensor[3:], tensor[1 : size + 1]):
        assert int(BitHash(torch.device("cpu"))(part)) % MODULUS == hash_reference(bytes_of(part))


def test_shapes_and_strides_do_not_matter_but_order_does() -> None:
    hash_bits, square = BitHash(torch.device("cpu")), torch.randn(40, 60)
    assert hash_bits(square) == hash_bits(square.flatten()) == hash_bits(square.T.contiguous().T)
    assert hash_bits(square) != hash_bits(square.T) and hash_bits(square) != hash_bits(square.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_flip_of_one_bit_changes_the_hash(dtype: torch.dtype) -> None:
    """All bits of some elements, in the first block, in a middle one and in the last, incomplete one."""
    hash_bits, draw = BitHash(torch.device("cpu")), random.Random(1)
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    tensor = torch.randn(3 * 2 * BLOCK + 5).to(dtype)
    bits, before = tensor.view(integers), int(hash_bits(tensor))
    for place in [0, len(tensor) - 1, *(draw.randrange(len(tensor)) for _ in range(3))]:
        for bit in range(8 * tensor.element_size()):
            flip = 1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit)
            bits[place] ^= flip
            assert int(hash_bits(tensor)) != before, (place, bit)
            bits[place] ^= flip
    assert int(hash_bits(tensor)) == before
