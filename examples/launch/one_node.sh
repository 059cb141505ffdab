#!/usr/bin/env bash
# The first commands on one host with GPUs, in order; each must succeed before the next is worth trying.
#
#   GPUS=8 RUN=debug_small bash one_node.sh
set -euo pipefail

gpus=${GPUS:-8}
run=${RUN:-debug_small}
# A port of its own means no rendezvous service: nothing is unpickled from the network. Another job on this host: another port.
ranks=(torchrun --master-port "${PORT:-29500}" --nproc-per-node "$gpus" -m moefold.cli.main)

# What a hang leaves behind: `moefold support-bundle` collects it.
export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1

moefold doctor --gpus
"${ranks[@]}" doctor --gpus --seconds 30
"${ranks[@]}" prove "$run" --device cuda --parallel.ep "$gpus"
"${ranks[@]}" prove "$run" --device cuda --parallel.ep "$gpus" --dtype bfloat16
moefold bench layer b --device cuda
"${ranks[@]}" train "$run" --device cuda --parallel.ep "$gpus" --precision.compute bfloat16 \
    --data.micro_batch 1 --data.global_batch "$((gpus * 2))" --train.steps 50
