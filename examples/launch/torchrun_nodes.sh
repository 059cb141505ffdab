#!/usr/bin/env bash
# The same on several hosts: start it once on every host, with the same HEAD and NODES.
#
#   HEAD=host0 NODES=2 NODE_RANK=0 GPUS=8 RUN=debug_small bash torchrun_nodes.sh
set -euo pipefail

: "${HEAD:?the name of the host with NODE_RANK 0}" "${NODES:?the number of hosts}" "${NODE_RANK:?0 to NODES - 1}"
gpus=${GPUS:-8}
run=${RUN:-debug_small}
ep=${EP:-$gpus}
# A fixed address and no rendezvous service: nothing is unpickled from the network.
ranks=(torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$gpus"
    --master-addr "$HEAD" --master-port "${PORT:-29500}" -m moefold.cli.main)

export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1

"${ranks[@]}" doctor --gpus --seconds 30
"${ranks[@]}" prove "$run" --device cuda --parallel.ep "$ep"
"${ranks[@]}" train "$run" --device cuda --parallel.ep "$ep" --precision.compute bfloat16 \
    --data.micro_batch 1 --data.global_batch "$((gpus * NODES * 2))" --train.steps 50
