#!/usr/bin/env bash
# One sweep over the GPUs of a Slurm allocation through Ray. docs/cluster.md
#   DASH_DB=postgresql://USER@HOST/dash sbatch docs/ray-slurm.sh [more options of dash-tune]
# Activate the environment that has dash-kernels[postgres,ray] before sbatch: it is taken along.
#SBATCH --job-name=dash-tune
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail
: "${DASH_DB:?set it to postgresql://USER@HOST/NAME, one database that every node can reach}"

export TRITON_CACHE_DIR="${SLURM_TMPDIR:-/tmp}/dash-triton-$USER" # on the node's own disk
head=$(hostname)
port=6379
export RAY_ADDRESS="$head:$port"
cpus=${SLURM_CPUS_PER_TASK:-$(nproc)}
gpus=${SLURM_GPUS_PER_NODE:?ask for GPUs with --gpus-per-node=N}
gpus=${gpus##*:} # "h200:8" is 8
start=(srun --overlap --ntasks-per-node=1 ray start --block --num-cpus="$cpus" --num-gpus="$gpus")

"${start[@]:0:3}" --nodes=1 --nodelist="$head" "${start[@]:3}" --head --port="$port" &
until ray health-check --address "$RAY_ADDRESS" 2>/dev/null; do sleep 2; done
if ((SLURM_JOB_NUM_NODES > 1)); then
    "${start[@]:0:3}" --nodes=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" "${start[@]:3}" --address="$RAY_ADDRESS" &
fi

# The time limit's TERM ends the sweep in order; the same sbatch goes on from there. A node that comes late joins in.
dash-tune --gpu auto --engine ray "$@" &
sweep=$!
trap 'kill -TERM "$sweep"' TERM
code=0
wait "$sweep" || code=$?
if kill -0 "$sweep" 2>/dev/null; then # wait returned for the signal: the sweep is ending
    code=0
    wait "$sweep" || code=$?
fi
exit "$code"
