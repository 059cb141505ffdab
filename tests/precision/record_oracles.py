"""Record what other libraries' own quantisers make of a million hard values, as hashes that CI can compare with.

Their CPU code is loaded from checkouts, because the packages need CUDA libraries (Transformer Engine, DeepGEMM) or are
behind their main branch (torchao's wheel flushes subnormals). Run it when a rule changes, or for a newer version:

    python -m tests.precision.record_oracles --te DIR --ao DIR --deepgemm DIR --versions te=d0067d0 ao=36027d8 ...

torchao's wheel must be importable for its enumerations. `tests/precision/oracles.json` is what it writes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.precision.cast_inputs import Kind, hard_values
from torch import Tensor

from moefold.config.casts import Cast
from moefold.precision.quantize import FLOAT8, HADAMARD_SIGNS, quantize, unpack_e2m1

RECORDED = Path(__file__).with_name("oracles.json")
# Scales and codes in the layout of ``Quantized``, E2M1 codes packed.
Oracle = Callable[[Tensor, Cast], tuple[Tensor, Tensor]]


class Compared(NamedTuple):
    """A cast and the inputs. ``unsigned_zeros``: the library writes 0 where a negative value rounds to zero, so both
    sides are compared without the sign of zeros, and the recorded row counts these codes."""

    library: str
    cast: Cast
    kind: Kind
    unsigned_zeros: bool = False


MX = [Cast(element, (1, 32), rule) for element in ("e4m3", "e5m2") for rule in ("e8m0_rceil", "e8m0_floor")]
BLOCKWISE = [Cast("e4m3", block, rule) for block in ((1, 128), (128, 128)) for rule in ("power_of_two", "float32")]
PER_TENSOR = [Cast(element, None, "float32") for element in ("e4m3", "e5m2")]
NVFP4 = [Cast("e2m1", block, "two_level") for block in ((1, 16), (16, 16))]
HADAMARD = replace(NVFP4[0], hadamard=True)

COMPARED = [
    *(Compared("torchao mx", cast, kind) for cast in MX for kind in ("bfloat16", "float32")),
    *(Compared("te blockwise", cast, kind) for cast in BLOCKWISE for kind in ("bfloat16", "float32")),
    *(Compared("deepgemm", cast, "narrow range") for cast in BLOCKWISE if cast.scale == "power_of_two"),
    *(Compared("te per tensor", cast, "narrow range") for cast in PER_TENSOR),
    *(Compared("te nvfp4", cast, kind, True) for cast in NVFP4 for kind in ("bfloat16", "narrow range")),
    *(Compared("torchao nvfp4", cast, kind) for cast in NVFP4 for kind in ("bfloat16", "narrow range")),
    Compared("te nvfp4", HADAMARD, "narrow range of bfloat16", True),
]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def without_sign_of_zero(packed: Tensor) -> Tensor:
    """E2M1 pairs in which -0 is 0."""
    low, high = packed & 0xF, packed & 0xF0
    return torch.where(low == 8, 0, low) | torch.where(high == 0x80, 0, high)


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _stub(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module


def te_oracles(root: Path) -> Iterator[tuple[str, Oracle]]:
    references, parts = root / "tests/pytorch/references", root / "transformer_engine/pytorch/custom_recipes"
    _stub("references")
    scales = _module("references.quantize_scale_calc", references / "quantize_scale_calc.py")
    blocks = _module("references.blockwise_quantizer_reference", references / "blockwise_quantizer_reference.py")
    quantizer = blocks.BlockwiseQuantizerReference()

    def blockwise(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
        powers = cast.scale == "power_of_two"
        kwargs = {"quant_tile_shape": cast.block, "pow_2_scales": powers, "munge_scale_shapes": False}
        found = quantizer.quantize(x, FLOAT8[cast.element], **kwargs)
        return found.scale, found.data

    def per_tensor(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
        dtype, kwargs = FLOAT8[cast.element], {"eps": 0.0, "pow_2_scales": False}
        encode, decode, _ = scales.scale_from_amax_tensor(torch.float32, x.abs().amax().view(1), dtype, **kwargs)
        return decode.view(1, 1), (x * encode).to(dtype)

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    package = "transformer_engine.pytorch"
    for name in ("transformer_engine", package, f"{package}.tensor"):
        _stub(name)
    _stub(f"{package}.tensor.utils", is_custom=lambda *_: True)
    _stub(f"{package}.quantized_tensor", Quantizer=Quantizer, QuantizedTensorStorage=type("Storage", (), {}))
    _stub(f"{package}.custom_recipes")
    for name in ("reference_utils", "gemm"):
        setattr(
            sys.modules[f"{package}.custom_recipes"],
            name,
            _module(f"{package}.custom_recipes.{name}", parts / f"{name}.py"),
        )
    reference = _module(f"{package}.custom_recipes.reference_nvfp4", parts / "reference_nvfp4.py").NVFP4QuantizerRef

    def nvfp4(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
        if cast.hadamard:
            _, _, codes, scale, *_ = reference(
                dtype=None, rowwise=False, quant_tile_shape=cast.block, with_rht=True
            )._quantize(x.t().contiguous().bfloat16())
        else:
            codes, scale, *_ = reference(dtype=None, columnwise=False, quant_tile_shape=cast.block)._quantize(x)
        assert cast.block is not None
        return scale[:: cast.block[0]], codes

    yield from (("te blockwise", blockwise), ("te per tensor", per_tensor), ("te nvfp4", nvfp4))


def ao_oracles(root: Path) -> Iterator[tuple[str, Oracle]]:
    import torchao.prototype.moe_training.nvfp4_training.hadamard_utils as hadamard_utils
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    mx = _module("torchao.prototype.mx_formats.mx_tensor_main", root / "torchao/prototype/mx_formats/mx_tensor.py")

    def mxfp8(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
        mode = ScaleCalculationMode[cast.scale.removeprefix("e8m0_").upper()]
        scale, codes = mx.to_mx(x, FLOAT8[cast.element], 32, mode)
        return scale.view(torch.uint8), codes

    # A name that the wheel does not have yet.
    vars(hadamard_utils).setdefault("DEFAULT_SIGN_VECTOR", HADAMARD_SIGNS)
    path = root / "test/prototype/moe_training/nvfp4_training/nvfp4_reference.py"
    reference = _module("ao_nvfp4_reference", path)

    def nvfp4(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
        assert cast.block is not None
        found = reference.nvfp4_reference_quantize(x, x.abs().amax(), block=f"{cast.block[0]}x{cast.block[1]}")
        return found.block_scale, found.codes

    yield from (("torchao mx", mxfp8), ("torchao nvfp4", nvfp4))


def deepgemm_oracles(root: Path) -> Iterator[tuple[str, Oracle]]:
    math = _module("deepgemm_math", root / "deep_gemm/utils/math.py")

    def blockwise(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
        assert cast.block is not None
        quantize = math.per_token_cast_to_fp8 if cast.block[0] == 1 else math.per_block_cast_to_fp8
        codes, scale = quantize(x, use_ue8m0=cast.scale == "power_of_two")
        return scale, codes

    yield "deepgemm", blockwise


def main() -> int:
    parser = argparse.ArgumentParser(description="Record other libraries' quantisers.")
    for library in ("te", "ao", "deepgemm"):
        parser.add_argument(f"--{library}", type=Path, required=True, help="its checkout")
    parser.add_argument("--versions", nargs="+", required=True, metavar="LIBRARY=COMMIT")
    args = parser.parse_args()
    versions = dict(words.split("=") for words in args.versions)
    oracles = {
        name: (oracle, versions[library])
        for library, found in (
            ("te", te_oracles(args.te)),
            ("ao", ao_oracles(args.ao)),
            ("deepgemm", deepgemm_oracles(args.deepgemm)),
        )
        for name, oracle in found
    }
    rows = []
    for compared in COMPARED:
        oracle, version = oracles[compared.library]
        scale, codes = oracle(hard_values(compared.kind), compared.cast)
        print(compared.library, compared.cast, compared.kind, tuple(scale.shape), tuple(codes.shape))
        row = {"library": compared.library, "version": version, "cast": str(compared.cast), "inputs": compared.kind}
        if compared.unsigned_zeros:
            ours = quantize(hard_values(compared.kind), compared.cast).codes_MK
            row["zeros_without_sign"] = int((unpack_e2m1(codes) != ours).sum())
            codes = without_sign_of_zero(codes)
        rows.append(row | {"scales": digest(scale), "codes": digest(codes)})
    RECORDED.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
