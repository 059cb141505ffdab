"""`moefold generate`: what a trained model says: after prompts, or in a conversation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.run_argument import Subparsers, add_device_option
from moefold.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    from moefold.checkpoint.trained_model import TrainedModel
    from moefold.data.text_codec import Message, TextCodec
    from moefold.model.generation import Continuation, OnStep, Sampling

EXAMPLES = """examples:
  moefold generate runs/debug_small --prompt "def main(" --max-new 100
  moefold generate Qwen3-30B-A3B --chat --system "You are brief." --prompt "Why is the sky blue?"
  moefold generate Qwen3-30B-A3B --chat
  moefold generate runs/my_run --prompt-file prompts.txt --temperature 0 --json
  moefold generate runs/my_run --prompt "Once" --samples 4 --top-p 0.9 --seed 7

SOURCE is a run (its newest checkpoint), a checkpoint, or a Hugging Face directory; its tokenizer is used.
One process, all prompts in one batch, keys and values cached. --temperature 0 takes the likeliest token. The same seed
gives the same text, whatever else is in the batch. --chat without a prompt reads a line at a time and remembers the
conversation; an empty line, or Ctrl-D, ends it."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "generate",
        help="text from a trained model: prompts in a batch, or a chat",
        description="Generate text with a run's newest checkpoint, a checkpoint or a Hugging Face directory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source(parser)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    parser.add_argument("--prompt-file", metavar="FILE", help="one prompt per line; - is stdin")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages, by the chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message of a chat")
    parser.add_argument("--max-new", type=int, default=64, metavar="N", help="tokens after each prompt at most (64)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts for each prompt (1)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (0.8)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens only (0: of all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest with sum P only (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random numbers (0)")
    parser.add_argument("--no-cache", action="store_true", help="compute the whole text for every token: the reference")
    parser.add_argument("--json", action="store_true", help="print one JSON object per text")
    parser.set_defaults(run=run)


def add_source(parser: argparse.ArgumentParser) -> None:
    """What `generate` and `eval` have in common."""
    parser.add_argument("source", metavar="SOURCE", help="a run, a checkpoint, or a Hugging Face directory")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of a tokenizer, or `bytes` (that of the model)")
    add_device_option(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"), help="to compute in (default: that of the run or model)"
    )


def open_source(args: argparse.Namespace) -> tuple[TrainedModel, TextCodec]:
    from moefold.checkpoint.trained_model import open_trained
    from moefold.comm.spawn import this_device
    from moefold.data.text_codec import open_codec

    device = this_device(args.device)
    print(f"reading {args.source} ...", file=sys.stderr, flush=True)
    model = open_trained(Path(args.source), device, args.dtype)
    return model, open_codec(args.tokenizer, model.tokenizer, model.vocab_size)


def run(args: argparse.Namespace) -> int:
    _refuse(args)
    texts = _prompts(args)
    from moefold.model.generation import Sampling

    model, codec = open_source(args)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    speaker = _Speaker(model, codec, sampling, args.max_new, not args.no_cache)
    if args.chat and not texts:
        return _converse(speaker, args)
    first: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    prompts = [
        codec.chat([*first, {"role": "user", "content": text}]) if args.chat else codec.encode(text)
        for text in texts
        for _ in range(args.samples)
    ]
    asked = [text for text in texts for _ in range(args.samples)]
    if not all(prompts):
        raise DataError("--prompt: a prompt has no tokens; give at least one character")
    alone = len(prompts) == 1 and not args.json
    if alone and not args.chat:
        print(asked[0], end="", flush=True)
    done = speaker.say(prompts, _Printer(codec, model, alone, args.max_new))
    for text, one in zip(asked, done, strict=True):
        _show(text, one, codec, model, args, alone)
    return 0


@dataclass(frozen=True)
class _Speaker:
    model: TrainedModel
    codec: TextCodec
    sampling: Sampling
    max_new: int
    cached: bool

    @property
    def stop(self) -> frozenset[int]:
        return self.codec.stop | self.model.stop

    def say(self, prompts: Sequence[Sequence[int]], on_step: OnStep | None) -> list[Continuation]:
        from moefold.model.generation import generate, generate_reference

        decoder = self.model.decoder
        if self.cached:
            return generate(decoder, self.model.cache, prompts, self.max_new, self.sampling, self.stop, on_step)
        return generate_reference(decoder, prompts, self.max_new, self.sampling, self.stop, on_step)


class _Printer:
    """One text appears as it is generated; of several, the number of tokens, every two seconds."""

    def __init__(self, codec: TextCodec, model: TrainedModel, stream: bool, max_new: int) -> None:
        self.codec, self.stream, self.max_new = codec, stream, max_new
        self.tokens: list[int] = []
        self.shown, self.steps, self.last = "", 0, time.monotonic()

    def __call__(self, step: list[int | None]) -> None:
        self.steps += 1
        if self.stream and step[0] is not None:
            self.tokens.append(step[0])
            text = self.codec.decode(self.tokens)
            # Half a character waits for its other half.
            if text.startswith(self.shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                print(text[len(self.shown) :], end="", flush=True)
                self.shown = text
        elif not self.stream and time.monotonic() - self.last > 2:
            self.last = time.monotonic()
            print(f"generating: {self.steps} of at most {self.max_new} tokens", file=sys.stderr, flush=True)


def _show(
    prompt: str, one: Continuation, codec: TextCodec, model: TrainedModel, args: argparse.Namespace, streamed: bool
) -> None:
    if args.json:
        text = codec.decode(one.tokens)
        ended = "stop" if one.stopped else "length"
        found = {"prompt": prompt, "text": text, "tokens": one.tokens, "logprobs": one.logprobs, "ended": ended}
        print(json.dumps(found, ensure_ascii=False))
    elif streamed:
        print()
    else:
        print(("" if args.chat else prompt) + codec.decode(one.tokens))
        print("---")


def _converse(speaker: _Speaker, args: argparse.Namespace) -> int:
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    codec = speaker.codec
    # Refused before somebody has typed a question.
    codec.chat([*messages, {"role": "user", "content": "?"}])
    for line in _lines():
        messages.append({"role": "user", "content": line})
        (answer,) = speaker.say([codec.chat(messages)], _Printer(codec, speaker.model, not args.json, args.max_new))
        text = codec.decode(answer.tokens)
        print(json.dumps({"prompt": line, "text": text}, ensure_ascii=False) if args.json else "", flush=True)
        messages.append({"role": "assistant", "content": text})
    return 0


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        yield line


def _refuse(args: argparse.Namespace) -> None:
    problems = []
    if args.max_new < 1:
        problems.append(Problem("--max-new", f"is {args.max_new}", "use 1 or more"))
    if args.samples < 1:
        problems.append(Problem("--samples", f"is {args.samples}", "use 1 or more"))
    if not 0 <= args.temperature < float("inf"):
        problems.append(Problem("--temperature", f"is {args.temperature:g}", "use 0 (greedy) or more"))
    if args.top_k < 0:
        problems.append(Problem("--top-k", f"is {args.top_k}", "use 0 (all tokens) or more"))
    if not 0 < args.top_p <= 1:
        problems.append(Problem("--top-p", f"is {args.top_p:g}", "use a number above 0, at most 1"))
    if not args.chat and args.prompt is None and args.prompt_file is None:
        problems.append(Problem("--prompt", "nothing to continue", "give --prompt TEXT, --prompt-file FILE or --chat"))
    if args.system is not None and not args.chat:
        problems.append(Problem("--system", "is a message of a chat", "add --chat, or leave it out"))
    if problems:
        raise ConfigError(*problems)


def _prompts(args: argparse.Namespace) -> list[str]:
    texts = list(args.prompt or ())
    if args.prompt_file is not None:
        from moefold.data.text_codec import read_text

        text = sys.stdin.read() if args.prompt_file == "-" else read_text(Path(args.prompt_file))
        found = [line for line in text.splitlines() if line.strip()]
        if not found:
            raise DataError(f"--prompt-file {args.prompt_file}: has no prompt; write one per line")
        texts += found
    return texts
