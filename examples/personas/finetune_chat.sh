#!/usr/bin/env bash
# Somebody who fine-tunes Qwen3-30B-A3B on chat data: conversations in, LoRA adapters and merged weights out, and both asked
# and evaluated. The model is a small one of the same family with the same kind of tokenizer, made here in place of 60 GB;
# put the downloaded directory in its place, and `--parallel.ep 8` under torchrun on eight GPUs.
set -euo pipefail

python - <<'MODEL'
import json

import tokenizers
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

words = tokenizers.Tokenizer(tokenizers.models.BPE())
words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = tokenizers.decoders.ByteLevel()
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
words.train_from_iterator([], tokenizers.trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
template = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
config = Qwen3MoeConfig(vocab_size=272, **shape, **experts, bos_token_id=None, eos_token_id=2, pad_token_id=None)
torch.manual_seed(0)
Qwen3MoeForCausalLM(config).save_pretrained("Qwen3-small")
words.save("Qwen3-small/tokenizer.json")
kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
json.dump(kind, open("Qwen3-small/tokenizer_config.json", "w"))

capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Peru": "Lima", "Egypt": "Cairo"}
with open("chat.jsonl", "w") as file:
    for _ in range(20):
        for country, city in capitals.items():
            asked = {"role": "user", "content": f"The capital of {country}?"}
            file.write(json.dumps({"messages": [asked, {"role": "assistant", "content": city}]}) + "\n")
MODEL

# Only what the assistant says counts in the loss. First all weights, because the small model knows nothing yet; then
# adapters on top of the exported result, as one would on a downloaded model; adapters for PEFT, and merged weights.
moefold sft capitals --from Qwen3-small --data chat.jsonl --train.steps 60 --optim.lr 1e-2 --data.seq_len 1024
moefold convert to-hf runs/capitals learned
moefold sft more --from learned --data chat.jsonl --lora 8 --train.steps 5 --optim.lr 1e-3 --data.seq_len 1024
moefold convert to-peft runs/more adapters --base learned
moefold convert to-hf runs/more merged --merge

# What was trained, used: how likely it finds the answers, before and after, and what it answers itself.
moefold eval Qwen3-small --data runs/capitals/data/chat --context 1024 --json > before.json
moefold eval runs/more --data runs/capitals/data/chat --json > after.json
moefold generate runs/more --chat --prompt "The capital of France?" --prompt "The capital of Japan?" \
    --prompt "The capital of Egypt?" --temperature 0 --json > answers.jsonl

python - <<'CHECK'
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def losses_of(run):
    lines = [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


losses, more = losses_of("capitals"), losses_of("more")
assert losses[-1] < 0.2 * losses[0], losses
assert more[0] < 0.2 * losses[0], "the adapters started somewhere else than where the first run ended"
assert Path("adapters/adapter_model.safetensors").is_file()

# Only answers count, in `eval` as in training; what the run answers is what its exported weights answer in transformers.
before, after = (json.loads(Path(name).read_text()) for name in ("before.json", "after.json"))
assert before["tokens"] == after["tokens"] == 700 and before["counted"] == "those of the loss mask", before
assert after["loss"] < 0.5 < 4 < before["loss"] and after["accuracy"] > 0.95, (before, after)
answers = {line["prompt"]: line["text"] for line in map(json.loads, Path("answers.jsonl").read_text().splitlines())}

words, model = AutoTokenizer.from_pretrained("merged"), AutoModelForCausalLM.from_pretrained("merged").eval()
right = 0
for country, city in {"France": "Paris", "Japan": "Tokyo", "Egypt": "Cairo"}.items():
    asked = [{"role": "user", "content": f"The capital of {country}?"}]
    prompt = words.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)
    answer = words.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"The capital of {country}? {answer}")
    assert answer == answers[f"The capital of {country}?"], answers
    right += answer == city
assert right >= 2, "the merged model has not learned the answers"
print(f"the loss of answers fell from {before['loss']:.2f} to {after['loss']:.3f}")
CHECK
echo "fine-tuning: done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
