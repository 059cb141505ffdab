"""GRPO on a CPU: a tiny MoE learns to count. moefold trains, transformers samples from the streamed weights.

The task can be verified: after a number comes the next one, modulo 16. The reward of an answer is the share of its
tokens that are their predecessor plus one; answers by chance get 1/16. The arguments are a directory for the results,
and a number of steps.
"""

# %% A model of a family that transformers knows, with random weights.
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers

import moefold

directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="moefold-example-"))
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 50
NUMBERS, PROMPTS, GROUP, ANSWER = 16, 16, 8, 6
run = moefold.load_run(
    "qwen3_30b_a3b_proxy",
    {
        "model.vocab_size": NUMBERS,
        "model.num_layers": 2,
        "model.moe.balance.microbatch": 0.0,
        "optim.lr": 0.003,
        "data.seq_len": 1024,
    },
)
engine = moefold.rl.Engine(run)
# Its weights stay as they are: the policy is not to go far from it.
reference = moefold.rl.Engine(run)
torch.manual_seed(0)


# %% The engine that samples gets its weights by HF name, without disk.
def sampler(weights):
    config = transformers.AutoConfig.for_model(**engine.hf_config(1024))
    return transformers.Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=dict(weights)).eval()


def sample(model):
    """A group of answers to each prompt, and the log-prob of every token that was sampled."""
    prompts = torch.randint(NUMBERS, (PROMPTS, 2))
    prompts[:, 1] = (prompts[:, 0] + 1) % NUMBERS
    out = model.generate(
        prompts,
        # Without it, generate would take every 0 of a prompt for padding: the comparison below showed it.
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=ANSWER,
        num_return_sequences=GROUP,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    logprobs = torch.stack(out.logits, 1).log_softmax(-1)
    tokens = out.sequences
    sampled = logprobs.gather(2, tokens[:, 2:, None])[..., 0]
    return tokens, torch.cat([torch.zeros(len(tokens), 2), sampled], 1)


def rewards_of(tokens):
    right = tokens[:, 2:] == (tokens[:, 1:-1] + 1) % NUMBERS
    return right.double().mean(1).tolist()


# %% A step: sample, score, compare, train.
record = []
for step in range(steps):
    tokens, sampled = sample(sampler(engine.weights()))
    rewards = rewards_of(tokens)
    advantages = moefold.rl.group_advantages(rewards, GROUP)
    counted = (torch.arange(tokens.shape[1]) >= 2).expand_as(tokens)
    rollouts = [moefold.rl.Rollout(row, mask) for row, mask in zip(tokens, counted, strict=True)]
    old, ref = engine.score(rollouts).logprobs, reference.score(rollouts).logprobs
    match = moefold.rl.compare_logprobs(old, list(sampled), list(counted), list(tokens), tolerance=1e-3)
    assert match.matches, match.text()
    rollouts = [
        moefold.rl.Rollout(row, mask, torch.full(row.shape, advantage), old_logprobs, ref_logprobs)
        for row, mask, advantage, old_logprobs, ref_logprobs in zip(tokens, counted, advantages, old, ref, strict=True)
    ]
    done = engine.train_step(rollouts, "grpo", normalize="sequences", kl_weight=0.001)
    reward = round(sum(rewards) / len(rewards), 6)
    record.append({"step": step, "reward": reward, "kl": done.metrics["kl"], "apart": match.max_abs_difference})
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step:3d}  reward {record[-1]['reward']:.3f}  {match.text().splitlines()[0]}")


# %% What came of it: numbers, and a picture of them.
def picture(values):
    """The reward by step, as an SVG that needs no library."""
    width, height, left, bottom = 640, 320, 56, 44
    across = (width - left - 16) / max(len(values) - 1, 1)
    up = height - bottom - 28

    def at(step, value):
        return f"{left + step * across:.1f},{height - bottom - value * up:.1f}"

    marks = "".join(
        f'<path d="M{left} {height - bottom - share * up:.1f}H{width - 16}" stroke="#ddd"/>'
        f'<text x="{left - 8}" y="{height - bottom - share * up + 4:.1f}" text-anchor="end">{share:.2f}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    marks += "".join(
        f'<text x="{left + step * across:.1f}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>'
        for step in range(0, len(values), 10)
    )
    line = " ".join(at(step, value) for step, value in enumerate(values))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#333"><rect width="{width}" height="{height}" fill="#fff"/>{marks}'
        f'<text x="{left}" y="17" font-size="14">mean reward of {PROMPTS * GROUP} answers</text>'
        f'<text x="{(left + width) / 2:.0f}" y="{height - 8}" text-anchor="middle">step</text>'
        f'<path d="M{at(0, 1 / NUMBERS)}L{at(len(values) - 1, 1 / NUMBERS)}" stroke="#999" stroke-dasharray="4 4"/>'
        f'<text x="{width - 20}" y="{height - bottom - up / NUMBERS - 5:.0f}" text-anchor="end">by chance</text>'
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/></svg>\n'
    )


(directory / "grpo_cpu.json").write_text(json.dumps({"steps": record}, indent=1) + "\n")
(directory / "grpo_reward.svg").write_text(picture([each["reward"] for each in record]))
first, last = (sum(each["reward"] for each in part) / len(part) for part in (record[:5], record[-5:]))
print(f"mean reward of the first five steps {first:.3f}, of the last five {last:.3f}; see {directory}")
assert last > first
