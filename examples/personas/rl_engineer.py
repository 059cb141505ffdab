"""An RL engineer who needs the training side: log-probs, GRPO steps, weights for the sampler, memory back meanwhile.

The sampler is transformers; it gets the weights by their Hugging Face names, and both must agree on log-probs. The
model is a small one of Qwen3-MoE's kind, made here in place of a download; the reward counts one byte, so that a few
steps are enough to see it rise.
"""

import subprocess
import time

import torch
from torch.nn.functional import log_softmax
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefold
from moefold.rl import Engine, Rollout, group_advantages

PROMPT, NEW, GROUPS, SAMPLES, STEPS, WANTED = 4, 8, 4, 8, 12, ord("e")
SHAPE = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2}


def main() -> None:
    started = time.time()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPE, **EXPERTS, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    sampler = Qwen3MoeForCausalLM(config).eval()
    sampler.save_pretrained("policy")

    # The run of this model: layout, precision and optimizer are keys of it, as in training.
    subprocess.run(["moefold", "convert", "from-hf", "policy", "runs", "--name", "policy"], check=True)
    run = moefold.load_run("runs/policy/config.yaml", {"optim.weight_decay": 0.0, "precision.compute": "float32"})
    engine = Engine(run, max_tokens=512)
    engine.load_hf("policy")

    prompts = torch.randint(256, (GROUPS, PROMPT))
    how = GenerationConfig(do_sample=True, max_new_tokens=NEW, num_return_sequences=SAMPLES, pad_token_id=0)
    seen = []
    for _ in range(STEPS):
        rows = sampler.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=how)
        rewards = (rows[:, PROMPT:] == WANTED).float().mean(1)
        seen.append(rewards.mean().item())
        counted = torch.arange(rows.shape[1]) >= PROMPT
        old = engine.score([Rollout(row, counted) for row in rows]).logprobs
        better = group_advantages(rewards.tolist(), SAMPLES)
        rollouts = [
            Rollout(row, counted, torch.full((len(row),), advantage), logprobs, logprobs)
            for row, advantage, logprobs in zip(rows, better, old, strict=True)
        ]
        engine.train_step(rollouts, "grpo", lr=1e-2)
        # The names are those of published files; how its modules stack them is transformers' business.
        weights = dict(engine.weights(torch.float32))
        sampler = Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=weights).eval()
    print("reward: " + " ".join(f"{reward:.2f}" for reward in seen))

    # Both engines give the same log-probs to the last answers; a released engine comes back as it was.
    ours = torch.stack(list(engine.score(rollouts).logprobs))[:, 1:]
    with torch.no_grad():
        theirs = log_softmax(sampler(rows).logits.float(), -1)[:, :-1].gather(2, rows[:, 1:, None])[..., 0]
    worst = (ours - theirs).abs().max().item()
    freed = engine.release()
    engine.restore()
    again = torch.stack(list(engine.score(rollouts).logprobs))[:, 1:]
    print(f"log-probs differ from transformers' by at most {worst:.1e}; {freed:,} bytes were given back and returned")

    assert worst < 1e-4 and freed > 0 and torch.equal(ours, again)
    assert sum(seen[-3:]) > 2 * sum(seen[:3]) + 0.1, seen
    print(f"RL engineer: done in {(time.time() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
