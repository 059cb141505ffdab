"""`moefold dpo`: fine-tune a published model on preference pairs; the same command again resumes."""

from __future__ import annotations

import argparse

from moefold.cli.run_argument import Subparsers
from moefold.cli.sft import add_options, run

EXAMPLES = """examples:
  moefold dpo my_dpo --from my_sft_model --data pairs.jsonl --lora 16
  moefold dpo my_dpo --from my_sft_model --data tokens/pairs --beta 0.05 --nproc 4 --parallel.ep 4
  moefold dpo my_dpo                        resumes, or trains what was prepared

--data is a file of rows with `chosen` and `rejected`, which the model's own tokenizer turns into token files in the
run's directory, or the prefix of such files (`moefold tokenize --preference`). The reference is the model as it was:
without its adapters, or a frozen copy. Metrics: rewards of chosen and rejected answers, their margin, and the share of
pairs whose chosen answer has the larger reward. 32 samples per step are 16 pairs. Options are those of `moefold sft`;
the lr is a tenth of its lr where none is given."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "dpo",
        help="fine-tune a published model on preference pairs (DPO)",
        description="DPO from a Hugging Face directory, in any layout. The same command again resumes. Any key of the "
        "run can be changed: --parallel.ep 8 --optim.lr 1e-6",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--beta", type=float, default=0.1, metavar="B", help="strength of the pull to the reference (0.1)"
    )
    add_options(parser)
    parser.set_defaults(run=run, kind="preference")
