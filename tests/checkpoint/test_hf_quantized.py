"""Weights published in fp8 blocks and in MXFP4 are read as transformers dequantizes them, and as the formats say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.body.model_inputs import batch_of
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import save_file
from tests.checkpoint.hf_sources import decoder_of, loaded_by_transformers, saved_by_transformers, tensors_in
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moefold.checkpoint.hf.hf_conversion import import_directory
from moefold.checkpoint.hf.hf_directory import HfDirectory
from moefold.checkpoint.hf.quantized_tensors import dequantize_blocks, dequantize_mxfp4
from moefold.cli.main import main
from moefold.errors import ConversionError
from moefold.recipes.catalog import RECIPES

BLOCK = (16, 12)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def fp8_by_loops(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    rows = [
        [c * scales[i // block[0], j // block[1]] for j, c in enumerate(row)] for i, row in enumerate(codes.float())
    ]
    return torch.stack([torch.stack(row) for row in rows])


def mxfp4_by_bits(blocks: Tensor, scales: Tensor) -> Tensor:
    """[out, G, 16] and [out, G]: each code from its sign, exponent and mantissa, as OCP's MX specification has it."""
    out = torch.zeros(blocks.shape[0], blocks.shape[1] * 32)
    for row in range(blocks.shape[0]):
        for group in range(blocks.shape[1]):
            for byte in range(16):
                for half in (0, 1):
                    code = int(blocks[row, group, byte]) >> (4 * half) & 0xF
                    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
                    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
                    scale = 2.0 ** (int(scales[row, group]) - 127)
                    out[row, group * 32 + 2 * byte + half] = (-1.0) ** sign * value * scale
    return out


def random_fp8(rows: int, columns: int, block: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    grid = -(-rows // block[0]), -(-columns // block[1])
    return codes, torch.rand(grid, generator=generator) * columns**-0.5


def random_mxfp4(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape[:-1], shape[-1] // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)


def test_fp8_blocks_are_what_the_format_says() -> None:
    codes, scales = random_fp8(37, 29, BLOCK, seed=1)
    assert torch.equal(dequantize_blocks(codes, scales, BLOCK), fp8_by_loops(codes, scales, BLOCK))
    codes, scales = random_fp8(256, 384, (128, 128), seed=2)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert torch.equal(dequantize_blocks(codes, scales, (128, 128)), expected)


def test_mxfp4_is_what_the_format_says() -> None:
    blocks, scales = random_mxfp4((3, 5, 64), seed=1)
    found = dequantize_mxfp4(blocks, scales)
    assert torch.equal(found[1], mxfp4_by_bits(blocks[1], scales[1]))
    assert torch.equal(found.mT, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


def write(directory: Path, like: Path, tensors: dict[str, Tensor], quantization: object = None) -> None:
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    config = json.loads((like / "config.json").read_text())
    config |= {} if quantization is None else {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))


def same_weights(quantized: Path, plain: Path) -> HfDirectory:
    found, expected = HfDirectory(quantized), HfDirectory(plain)
    assert list(found.names()) == list(expected.names())
    assert all(torch.equal(found.read(name), expected.read(name)) for name in found.names())
    return found


def fp8_directory(tmp_path: Path) -> tuple[dict[str, Tensor], Path]:
    """DeepSeek-V3's linear layers in fp8, and a directory of the same weights in float32."""
    saved_by_transformers(RECIPES["deepseek_v3_proxy"](), tmp_path / "like")
    plain, stored = tensors_in(tmp_path / "like"), {}
    for seed, (name, tensor) in enumerate(sorted(plain.items())):
        stored[name] = tensor
        if name.endswith("_proj.weight") or ("kv_" in name and tensor.dim() == 2):
            stored[name], scales = random_fp8(*tensor.shape, BLOCK, seed)
            stored[name + "_scale_inv"] = scales
            by_block = torch.kron(scales, torch.ones(BLOCK))[: tensor.shape[0], : tensor.shape[1]]
            plain[name] = stored[name].float() * by_block
    write(tmp_path / "plain", tmp_path / "like", plain)
    return stored, tmp_path / "plain"


def test_a_directory_in_fp8_is_read_as_its_dequantized_weights(tmp_path: Path) -> None:
    stored, plain = fp8_directory(tmp_path)
    write(tmp_path / "fp8", tmp_path / "like", stored, FP8)
    found = same_weights(tmp_path / "fp8", plain)
    done, run = import_directory(found, tmp_path / "runs", "imported")
    count = sum(name.endswith("_scale_inv") for name in stored)
    assert f"dequantized {count} tensors: float8_e4m3 with a scale for 16 x 12 (fp8)" in done.notes
    batch = batch_of(2, 37, run.model.vocab_size)
    with torch.no_grad():
        expected = loaded_by_transformers(plain)(batch.tokens_S.view(2, 37)).logits.flatten(0, 1)
        torch.testing.assert_close(decoder_of(found, run.model).logits(batch), expected, rtol=0, atol=1e-5)


def test_a_directory_in_mxfp4_is_read_as_its_dequantized_weights(tmp_path: Path) -> None:
    run = RECIPES["gpt_oss_20b_proxy"]()
    assert run.model.moe is not None
    # 32 codes share an exponent.
    run = replace(run, model=replace(run.model, moe=replace(run.model.moe, expert_hidden_dim=32)))
    saved_by_transformers(run, tmp_path / "like")
    plain, stored = tensors_in(tmp_path / "like"), {}
    for seed, (name, tensor) in enumerate(sorted(plain.items())):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = random_mxfp4(tuple(tensor.mT.shape), seed)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            stored[name] = tensor
    write(tmp_path / "plain", tmp_path / "like", plain)
    write(tmp_path / "mxfp4", tmp_path / "like", stored, {"quant_method": "mxfp4"})
    found = same_weights(tmp_path / "mxfp4", tmp_path / "plain")
    assert any("mxfp4" in note for note in found.notes)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, _ = fp8_directory(tmp_path)
    name = next(name for name in stored if name.endswith("o_proj.weight"))
    wrong = {
        "scales": stored | {name + "_scale_inv": torch.ones(1, 1)},
        "codes": stored | {name: stored[name].float()},
        "alone": {key: value for key, value in stored.items() if key != name + "_scale_inv"},
    }
    for what, tensors in wrong.items():
        write(tmp_path / what, tmp_path / "like", tensors, FP8)
        with pytest.raises(ConversionError) as caught:
            HfDirectory(tmp_path / what)
        assert [problem.path for problem in caught.value.problems] == [name]
    write(tmp_path / "unsaid", tmp_path / "like", stored)
    with pytest.raises(ConversionError):
        HfDirectory(tmp_path / "unsaid")
    write(tmp_path / "fp8", tmp_path / "like", stored, FP8)
    assert main(["convert", "from-hf", str(tmp_path / "fp8"), str(tmp_path / "runs"), "--name", "a", "--check"]) == 2
    assert "quantized" in capsys.readouterr().err
