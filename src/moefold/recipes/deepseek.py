"""DeepSeek and Kimi-K2: MLA, dense layers first, a shared expert.

V3 has sigmoid scores, group-limited routing, and a loss-free bias instead of a balance loss. It is listed without its
MTP module, as its size is published; `model.num_mtp: 1` adds it.
"""

from __future__ import annotations

from moefold.config.attention import MLAConfig, RopeConfig, YarnConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.optim import LRPhaseConfig, LRScheduleConfig, OptimConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.config.train import TrainConfig

# Of all parameters: sections 3.1.2 of V2's report and 4.2 of V3's. The config.json of both say 0.02.
INIT_STD = 0.006


# V2's report, appendix B: V2-Lite has 2,000 steps of warmup, times 0.316 after 80 % of the tokens and again after 90 %.
_V2_LITE_LR = LRScheduleConfig(
    kind="phases",
    warmup=2000,
    phases=(LRPhaseConfig(0.8, 1.0), LRPhaseConfig(0.1, 0.316), LRPhaseConfig(0.1, 0.316**2)),
)
# V3's report, section 4.2: 2.2e-4 up to 10T tokens, a cosine to 2.2e-5 over 4.3T, 333B there and 167B at 7.3e-6. Its
# batch grows from 3,072 to 15,360 sequences in the first 469B tokens; here it is constant. In the last 500B tokens the
# loss-free bias is not updated, and after 10T the weight of MTP falls from 0.3 to 0.1; here both stay.
_V3_LR = LRScheduleConfig(
    kind="phases",
    warmup=2000,
    phases=(
        LRPhaseConfig(10 / 14.8, 1.0),
        LRPhaseConfig(4.3 / 14.8, 0.1, "cosine"),
        LRPhaseConfig(0.333 / 14.8, 0.1),
        LRPhaseConfig(0.167 / 14.8, 7.3e-6 / 2.2e-4),
    ),
)
# Kimi-K2's report, section 2.5: 500 steps of warmup, 10T tokens at 2e-4, a cosine to 2e-5 over 5.5T; QK-clip at 100.
# The annealing to 7e-6 over 400B more tokens is a run of its own.
_KIMI_LR = LRScheduleConfig(
    kind="phases",
    warmup=500,
    phases=(LRPhaseConfig(10 / 15.5, 1.0), LRPhaseConfig(5.5 / 15.5, 0.1, "cosine")),
)


def deepseek_v2_lite() -> RunConfig:
    """Queries without low rank, two shared experts, softmax probs that are not normalised."""
    return RunConfig(
        name="deepseek_v2_lite",
        model=ModelConfig(
            vocab_size=102_400,
            dim=2048,
            num_layers=27,
            attention=MLAConfig(num_heads=16, q_latent=None, kv_latent=512, nope_dim=128, rope_dim=64, value_dim=128),
            rope=_v2_rope(original_context=4096),
            moe=MoEConfig(
                num_experts=64, top_k=6, expert_hidden_dim=1408, balance=_V2_BALANCE, shared_hidden_dim=2 * 1408
            ),
            num_dense_layers=1,
            dense_hidden_dim=10_944,
            init_std=INIT_STD,
        ),
        parallel=ParallelConfig(ep=8),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=4608),
        optim=OptimConfig(lr=4.2e-4, lr_schedule=_V2_LITE_LR),
        train=_tokens(5.7e12, batch=4608),
    )


def deepseek_v2_lite_proxy() -> RunConfig:
    """V2-Lite's shape: two shared experts as one of twice the hidden dim, one dense layer first."""
    return RunConfig(
        name="deepseek_v2_lite_proxy",
        model=ModelConfig(
            vocab_size=256,
            dim=64,
            num_layers=3,
            attention=MLAConfig(num_heads=4, q_latent=None, kv_latent=32, nope_dim=16, rope_dim=8, value_dim=12),
            rope=_v2_rope(original_context=64),
            moe=MoEConfig(num_experts=16, top_k=3, expert_hidden_dim=40, balance=_V2_BALANCE, shared_hidden_dim=2 * 40),
            num_dense_layers=1,
            dense_hidden_dim=160,
            init_std=INIT_STD,
        ),
    )


def deepseek_v3() -> RunConfig:
    """256 experts in eight groups, three dense layers, a loss-free bias; the layout is a starting point, not tuned."""
    return RunConfig(
        name="deepseek_v3",
        model=v3_shape(
            vocab=129_280,
            dim=7168,
            layers=61,
            dense_layers=3,
            attention=MLAConfig(num_heads=128, q_latent=1536, kv_latent=512, nope_dim=128, rope_dim=64, value_dim=128),
            rope=_v3_rope(original_context=4096),
            experts=256,
            top_k=8,
            expert_hidden_dim=2048,
            dense_hidden_dim=18_432,
            groups=(8, 4),
            scale=2.5,
            init_std=INIT_STD,
        ),
        parallel=ParallelConfig(pp=16, ep=64),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=15_360),
        optim=OptimConfig(lr=2.2e-4, lr_schedule=_V3_LR),
        train=_tokens(14.8e12, batch=15_360),
    )


def deepseek_v3_proxy() -> RunConfig:
    """V3's shape: a token is routed to half of the expert groups."""
    return RunConfig(
        name="deepseek_v3_proxy",
        model=v3_shape(
            vocab=256,
            dim=64,
            layers=3,
            dense_layers=1,
            attention=MLAConfig(num_heads=4, q_latent=48, kv_latent=32, nope_dim=16, rope_dim=8, value_dim=12),
            rope=_v3_rope(original_context=64),
            experts=16,
            top_k=4,
            expert_hidden_dim=24,
            dense_hidden_dim=160,
            groups=(4, 2),
            scale=2.5,
            init_std=INIT_STD,
        ),
    )


def _tokens(tokens: float, *, batch: int) -> TrainConfig:
    """So many steps of ``batch`` sequences of 4,096 tokens."""
    return TrainConfig(steps=round(tokens / (batch * 4096)))


def v3_shape(
    *,
    vocab: int,
    dim: int,
    layers: int,
    dense_layers: int,
    attention: MLAConfig,
    rope: RopeConfig,
    experts: int,
    top_k: int,
    expert_hidden_dim: int,
    dense_hidden_dim: int,
    groups: tuple[int, int],
    scale: float,
    init_std: float,
) -> ModelConfig:
    """What V3 and its descendants have in common; `groups` is (num_groups, top_groups)."""
    num_groups, top_groups = groups
    return ModelConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        attention=attention,
        rope=rope,
        moe=MoEConfig(
            num_experts=experts,
            top_k=top_k,
            expert_hidden_dim=expert_hidden_dim,
            router=RouterConfig(
                score="sigmoid",
                normalize=True,
                scale=scale,
                num_groups=num_groups,
                top_groups=top_groups,
                group_score="topk_sum",
                expert_bias=True,
            ),
            balance=BalanceConfig(sequence=1e-4),
            shared_hidden_dim=expert_hidden_dim,
        ),
        num_dense_layers=dense_layers,
        dense_hidden_dim=dense_hidden_dim,
        init_std=init_std,
    )


_V2_BALANCE = BalanceConfig(sequence=1e-3)


def _v2_rope(*, original_context: int) -> RopeConfig:
    yarn = YarnConfig(factor=40.0, original_context=original_context, mscale=0.707, mscale_all_dim=0.707)
    return RopeConfig(interleaved=True, yarn=yarn)


def _v3_rope(*, original_context: int) -> RopeConfig:
    yarn = YarnConfig(factor=40.0, original_context=original_context, mscale=1.0, mscale_all_dim=1.0)
    return RopeConfig(interleaved=True, yarn=yarn)


# ---- Kimi-K2: V3 with half the heads, 1.5 times the experts, one dense layer, no expert groups ----

# initializer_range of its config.json; the report gives none. Nor does it give a coefficient for the balance loss: V3's
# is taken, and config.json has DeepSeek's default, 0.001.
_KIMI_INIT_STD = 0.02


def kimi_k2() -> RunConfig:
    """384 experts, 64 heads, one dense layer; the layout is a starting point, not tuned."""
    return RunConfig(
        name="kimi_k2",
        model=v3_shape(
            vocab=163_840,
            dim=7168,
            layers=61,
            dense_layers=1,
            attention=MLAConfig(num_heads=64, q_latent=1536, kv_latent=512, nope_dim=128, rope_dim=64, value_dim=128),
            rope=_kimi_rope(original_context=4096),
            experts=384,
            top_k=8,
            expert_hidden_dim=2048,
            dense_hidden_dim=18_432,
            groups=(1, 1),
            scale=2.827,
            init_std=_KIMI_INIT_STD,
        ),
        parallel=ParallelConfig(pp=16, ep=16),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(seq_len=4096, global_batch=16_384),
        optim=OptimConfig(algorithm="muon", qk_clip=100.0, lr=2e-4, lr_schedule=_KIMI_LR),
        train=_tokens(15.5e12, batch=16_384),
    )


def kimi_k2_proxy() -> RunConfig:
    """Kimi-K2's shape: 12 experts, so that code that assumes a power of two fails."""
    return RunConfig(
        name="kimi_k2_proxy",
        model=v3_shape(
            vocab=256,
            dim=64,
            layers=3,
            dense_layers=1,
            attention=MLAConfig(num_heads=2, q_latent=48, kv_latent=32, nope_dim=16, rope_dim=8, value_dim=20),
            rope=_kimi_rope(original_context=64),
            experts=12,
            top_k=3,
            expert_hidden_dim=24,
            dense_hidden_dim=160,
            groups=(1, 1),
            scale=2.827,
            init_std=_KIMI_INIT_STD,
        ),
    )


def _kimi_rope(*, original_context: int) -> RopeConfig:
    yarn = YarnConfig(
        factor=32.0, original_context=original_context, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
    )
    return RopeConfig(theta=50_000.0, interleaved=True, yarn=yarn)
