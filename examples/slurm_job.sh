#!/usr/bin/env bash
# Lint the mesh, probe the backend on the GPUs of the job, then train:
#   sbatch --export=ALL,MESH=ddp=2,fsdp=8 slurm_job.sh
# Needs train.py in this directory, and meshplan with torch in the environment.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

: "${MESH:=ddp=2,fsdp=8}"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}

start() {
  local name=$1
  shift
  srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-$name" --rdzv-endpoint "$head:${PORT:-29500}" "$@"
}

# Each ends the job if it finds groups that may differ, or do differ.
meshplan lint --mesh "$MESH" --node-size "$SLURM_GPUS_ON_NODE"
start probe -m meshplan probe --mesh "$MESH"
start train train.py
