"""Mistakes on purpose: what a person typed, the files that lay there, and nothing else. The answers are `answers.txt`.

`{tmp}` is the folder in which the command runs. Prepared folders: `run` is a finished run of debug_tiny, `hf` its
export, `data` token files of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mistake:
    """``words`` are the command after `moefold`; ``files`` are written first, ``env`` is set."""

    name: str
    words: str
    files: dict[str, bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


RUN = b"recipe: debug_tiny\nname: mine\n"
LATIN = "caf\xe9 au lait\n".encode("latin1")
HF_MODEL = b'{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}'

MISTAKES = (
    # Verbs and options.
    Mistake("a verb with a typing mistake", "trian debug_tiny"),
    Mistake("a verb of another program", "finetune debug_tiny"),
    Mistake("an option that does not exist", "check debug_tiny --gpus-per-node 8"),
    Mistake("train without a run", "train"),
    Mistake("layout without its size", "layout --ep 4"),
    Mistake("a number that is text", "layout --world eight"),
    Mistake("a shell that there is no completion for", "completion tcsh"),
    # Names.
    Mistake("a recipe with a typing mistake", "check debug_tinny"),
    Mistake("a preset that no recipe has", "check deepseek_v3+tiny"),
    Mistake("a layout that no recipe has", "check deepseek_v3@h100x7"),
    Mistake("a run file that is not there", "check run.yaml"),
    Mistake("a run file that is a folder", "check folder.yaml", {"folder.yaml/inside": b""}),
    Mistake("a JSON file for a run", "check run.json", {"run.json": b'{"recipe": "debug_tiny"}'}),
    Mistake("a schedule with a typing mistake", "schedule dualpipe --stages 4 --microbatches 8"),
    Mistake("a GPU that is not known", "plan debug_tiny --gpu H1000 --gpus 8"),
    # Run files.
    Mistake("tabs in YAML", "check run.yaml", {"run.yaml": b"recipe: debug_tiny\ntrain:\n\tsteps: 10\n"}),
    Mistake("a colon without a space", "check run.yaml", {"run.yaml": b"recipe: debug_tiny\ntrain:\n  steps:10\n"}),
    Mistake("a bracket that is not closed", "check run.yaml", {"run.yaml": b"recipe: debug_tiny\ndata: {seq_len: 8\n"}),
    Mistake("a run file in latin1", "check run.yaml", {"run.yaml": b"recipe: debug_tiny\nname: caf\xe9\n"}),
    Mistake("a run file in UTF-16", "check run.yaml", {"run.yaml": "recipe: debug_tiny\n".encode("utf-16")}),
    Mistake("an empty run file", "check run.yaml", {"run.yaml": b""}),
    Mistake("a list for a run", "check run.yaml", {"run.yaml": b"- debug_tiny\n"}),
    Mistake("the same key twice", "check run.yaml", {"run.yaml": RUN + b"seed: 1\nseed: 2\n"}),
    Mistake("an octal number", "check run.yaml", {"run.yaml": RUN + b"seed: 010\n"}),
    Mistake("a run file that names no recipe that exists", "check run.yaml", {"run.yaml": b"recipe: deepseek_v4\n"}),
    # Keys and values.
    Mistake("a key with a typing mistake", "check debug_tiny --model.moe.topk 2"),
    Mistake("a key in the wrong section", "check debug_tiny --train.lr 1e-3"),
    Mistake("a section as a value", "check debug_tiny --model 3"),
    Mistake("a key without a value", "check debug_tiny --train.steps"),
    Mistake("text for a number", "check debug_tiny --train.steps many"),
    Mistake("a fraction for an integer", "check debug_tiny --parallel.ep 1.5"),
    Mistake("a word that is none of the choices", "check debug_tiny --parallel.dispatcher alltoall"),
    Mistake("a dtype that there is none of", "check debug_tiny --precision.compute fp16"),
    Mistake("a key of an older version", "check debug_tiny --data.documents joined"),
    Mistake("a negative learning rate", "check debug_tiny --optim.lr -1"),
    # Sizes.
    Mistake("more experts per token than experts", "check debug_tiny --model.moe.top_k 9"),
    Mistake("degrees that do not fold", "layout --world 8 --tp 3"),
    Mistake("more expert ranks than experts", "check debug_tiny --world 16 --parallel.ep 16"),
    Mistake("heads that tp does not divide", "check debug_tiny --world 3 --parallel.tp 3"),
    Mistake("a batch that does not divide", "check debug_tiny --world 8 --data.global_batch 12"),
    Mistake(
        "stages that a schedule does not have",
        "check debug_tiny --world 8 --parallel.pp 4 --parallel.vpp 2 --parallel.schedule 1f1b",
    ),
    Mistake("a model that fits nowhere", "plan debug_50m --gpu H100 --gpus 1 --fit 10MiB"),
    # What a run needs.
    Mistake("a published recipe without data", "train mixtral_8x7b"),
    Mistake("data that is not there", "train debug_tiny --data.train nowhere/tokens --data.validation null"),
    Mistake(
        "text where token files belong",
        "train debug_tiny --data.train notes.txt --data.validation null",
        {"notes.txt": b"hello\n"},
    ),
    Mistake(
        "tokens of a larger vocabulary",
        "train debug_tiny --model.vocab_size 64 --data.train data/bytes --data.validation null",
    ),
    Mistake("a GPU that is not there", "train debug_tiny --device cuda"),
    Mistake("a backend that cannot run here", "train debug_tiny --device cpu --kernels.attention flash_attn_3"),
    Mistake("ranks that do not fold", "train debug_tiny --nproc 2 --parallel.ep 4"),
    Mistake("a directory that cannot be written", "train debug_tiny --train.directory file", {"file": b""}),
    Mistake(
        "the same name for another run",
        "train debug_tiny --model.dim 128 --name run --train.directory . --train.steps 4",
    ),
    # Data.
    Mistake("text that is not there", "tokenize nothing.txt --out out"),
    Mistake("text in latin1", "tokenize cafe.txt --out out", {"cafe.txt": LATIN}),
    Mistake("JSONL with a broken line", "tokenize a.jsonl --out out", {"a.jsonl": b'{"text": "a"}\n{"text": \n'}),
    Mistake("JSONL without the key", "tokenize a.jsonl --out out", {"a.jsonl": b'{"text": "a"}\n{"content": "b"}\n'}),
    Mistake(
        "JSONL whose text is a number", "tokenize a.jsonl --out out", {"a.jsonl": b'{"text": "a"}\n\n{"text": 3}\n'}
    ),
    Mistake("tokens that are there already", "tokenize a.txt --out data/bytes", {"a.txt": b"hello"}),
    Mistake("a tokenizer that is none", "tokenize a.txt --out out --tokenizer a.txt", {"a.txt": b"hello"}),
    # Checkpoints and models.
    Mistake("a run that is not there", "report runs/nothing"),
    Mistake("a checkpoint that is not there", "inspect runs/nothing"),
    Mistake("an export over something", "convert to-hf run hf"),
    Mistake("an export of nothing", "convert to-hf runs/nothing out"),
    Mistake("a family that is not supported", "convert from-hf mamba runs --name m", {"mamba/config.json": HF_MODEL}),
    Mistake("a folder without a model", "convert from-hf empty runs --name m", {"empty/notes.txt": b""}),
    Mistake("a size without a unit", "convert to-hf run out --max-shard big"),
    # Use.
    Mistake("a model that is not there", "generate runs/nothing --prompt hello"),
    Mistake("nothing to continue", "generate run"),
    Mistake("probs that add up to more than one", "generate run --prompt a --top-p 1.5 --temperature -1"),
    Mistake("a chat with a model of bytes", "generate run --prompt a --chat"),
    Mistake("another model's tokenizer", "generate run --prompt a --tokenizer nowhere"),
    Mistake("an evaluation on nothing", "eval run"),
    Mistake("an evaluation on a text in latin1", "eval run --text cafe.txt", {"cafe.txt": LATIN}),
    Mistake("a report as a page and as a server", "plan debug_tiny --gpus 8 --serve --html plan.html"),
    Mistake("a port that there is none of", "plan debug_tiny --gpus 8 --serve 99999"),
)
