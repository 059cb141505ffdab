"""Call one MoE layer on a tensor, look at what its router does, and train it a little.

Run it as a script, or cell by cell in an editor that knows `# %%`.
"""

# %% A layer from a few sizes.
import torch

import moefold

torch.manual_seed(0)
layer = moefold.MoELayer.from_config(
    dim=32,  # model dim D: the last dimension of what goes in and comes out
    num_experts=8,
    top_k=2,  # experts per token
    expert_hidden_dim=64,
    shared_hidden_dim=64,  # a dense expert that sees every token
    router={"score": "softmax", "normalize": True},
    balance={"microbatch": 0.01},  # the balance loss of Switch and GShard, over all tokens of a call
    init_std=0.2,
)
print(layer.layer)

# %% Call it: four sequences of 16 tokens.
x = torch.randn(4, 16, 32)
y = layer(x)
assert y.shape == x.shape

# %% Where did the tokens go? `route` gives the experts of every token, and their probs.
routing = layer.route(x)
print("experts of the first token:", routing.experts[0].tolist())
print("their probs:               ", [round(prob, 3) for prob in routing.probs[0].tolist()])

# %% How even is the load? `forward_with_report` also gives tokens per expert and balance losses.
_, report = layer.forward_with_report(x)
print("tokens per expert:", report.counts_E.tolist())
assert report.counts_E.sum() == 4 * 16 * 2, "every token has two assignments"

# %% An MoE layer is a module like any other: teach it to rotate its input, with and without the balance loss.
target = x.roll(1, dims=-1)


def trained(balance: float) -> tuple[float, float]:
    """The loss after some steps, and the load of the busiest expert over the mean."""
    student = moefold.MoELayer.from_config(
        dim=32, num_experts=8, top_k=2, expert_hidden_dim=64, balance={"microbatch": balance}, init_std=0.2
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for _ in range(100):
        y, report = student.forward_with_report(x)
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        (loss + sum(report.losses)).backward()
        optimizer.step()
    counts_E = report.counts_E.float()
    return loss.item(), (counts_E.max() / counts_E.mean()).item()


for balance in (0.0, 0.1):
    loss, busiest = trained(balance)
    print(f"balance loss {balance}: error {loss:.4f}, busiest expert {busiest:.2f} times the mean")

# %% The layer of a published model, at the size of its proxy: DeepSeek-V3 scores by sigmoid, chooses groups of experts
# first, has a shared expert, and balances by a bias that is not trained.
run = moefold.load_run("deepseek_v3_proxy")
moe = moefold.MoELayer.from_config(run.model.moe, dim=run.model.dim)
print(run.model.moe.router)
print(f"{sum(parameter.numel() for parameter in moe.parameters()):,} parameters")
with torch.no_grad():
    print("output:", tuple(moe(torch.randn(5, run.model.dim)).shape))
