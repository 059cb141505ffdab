"""Six chat templates in the manner of published families, marked with `{% generation %}`, and a tokenizer for them.

`plain` removes the marks: the same text, but nothing that says what the model generates. Each template is one line, so
that removing a mark changes no white space.
"""
# ruff: noqa: RUF001 - DeepSeek's special tokens have these characters

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import tokenizers

# Tools first; reasoning only in turns after the last question, as Qwen3 has it; several tool calls in a turn.
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{% if loop.index0 > last.user and (loop.last or m.reasoning) %}"
    "{{ '<think>\n' + (m.reasoning or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{{ tools | tojson }}{{ '<|eot_id|>' }}{% endif %}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}{{ '<|python_tag|>' }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '<|eom_id|>' }}"
    "{% else %}{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}{% endgeneration %}"
    "{% else %}{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# No generation prompt; the system's text stands before the first question; roles must alternate.
MISTRAL = (
    "{{ '<s>' }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% set system = namespace(text='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set system.text = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST]' + system.text + m.content + '[/INST]' }}{% set system.text = '' %}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}{{ '[TOOL_CALLS]' }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% else %}{{ ' ' + m.content }}{% endif %}"
    "{{ '</s>' }}{% endgeneration %}{% else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}{% endfor %}"
)
# Special tokens inside a turn; reasoning is cut from every turn.
DEEPSEEK = (
    "{{ '<｜begin▁of▁sentence｜>' }}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if tools %}{{ '\n\nTools: ' + (tools | tojson) }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content }}"
    "{{ '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}"
    "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' }}{% generation %}"
    "{% if m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '\n' + (call.function.arguments | tojson) }}"
    "{{ '<｜tool▁call▁end｜>' }}"
    "{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
# The assistant is called model; the system's text is part of the first question; no tools.
GEMMA = (
    "{{ '<bos>' }}{% set first = namespace(text='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set first.text = m.content | trim + '\n\n' %}"
    "{% elif m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}{% generation %}"
    "{{ m.content | trim }}{{ '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<start_of_turn>user\n' + first.text + (m.content | trim) + '<end_of_turn>\n' }}"
    "{% set first.text = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Channels; the last message of all ends with another token, and reasoning of earlier ones is left out.
GPT_OSS = (
    "{{ '<|start|>system<|message|>You are helpful.<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant' }}{% generation %}"
    "{% if m.reasoning and loop.last %}{{ '<|channel|>analysis<|message|>' + m.reasoning }}"
    "{{ '<|end|><|start|>assistant' }}{% endif %}{% if m.tool_calls %}"
    "{{ '<|channel|>commentary to=' + m.tool_calls[0].function.name + '<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}{{ '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}{% endif %}"
    "{% endgeneration %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>tool<|channel|>commentary<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "gemma": GEMMA,
    "gpt_oss": GPT_OSS,
}
WITHOUT_TOOLS = {"gemma"}
_SPECIAL = re.compile(r"<\|[a-z_]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|</?s>|<bos>|<(?:start|end)_of_turn>")


def plain(template: str) -> str:
    return re.sub(r"\{% (end)?generation %\}", "", template)


def chat_folder(folder: Path, template: str) -> str:
    """A folder as a model's, with a small byte-level BPE tokenizer."""
    special = [
        "<|endoftext|>",
        *dict.fromkeys(found for each in TEMPLATES.values() for found in _SPECIAL.findall(each)),
    ]
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator([" ".join(_WORDS)] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


_WORDS = [
    "the",
    "assistant",
    "answers",
    "a",
    "question",
    "about",
    "weather",
    "in",
    "Köln",
    "今日",
    "😀",
    "and",
    "tools",
]
_WORDS += ["user", "model", "\n\n", "think", "</think>", "{x:", "1}"]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}


def conversation(rng: random.Random, tools: bool) -> dict[str, Any]:
    """Several turns: with or without a system's message, reasoning, tool calls and answers that look like others."""

    def words(most: int = 12) -> str:
        return " ".join(rng.choices(_WORDS, k=rng.randrange(1, most)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": words()}] if rng.random() < 0.5 else []
    same = words()
    for _ in range(rng.randrange(1, 5)):
        messages.append({"role": "user", "content": rng.choice([words(), same])})
        if tools and rng.random() < 0.4:
            call = {"type": "function", "function": {"name": "weather", "arguments": {"city": words(3)}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": words()})
        answer: dict[str, Any] = {"role": "assistant", "content": rng.choice([words(), same, "  " + words() + "\n"])}
        if rng.random() < 0.3:
            answer["reasoning"] = words()
        messages.append(answer)
    return {"messages": messages, **({"tools": [TOOL]} if tools else {})}
