#!/usr/bin/env bash
# Lint the mesh, then train; --probe shows in which order each group of the job adds:
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

# Ends the job if groups may differ.
meshplan lint --mesh "$MESH" --node-size "$SLURM_GPUS_ON_NODE"
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:${PORT:-29500}" \
  -m meshplan run --probe --report run.json train.py
