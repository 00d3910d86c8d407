#!/bin/bash
# Trains a recipe under Slurm, over as many job runs as it takes:
#
#     sbatch --nodes 4 docs/slurm.sh papers/huginn_3.5b /shared/runs/huginn --set parallel.kind=fsdp
#
# One task a GPU, without torchrun between: Slurm's signal then reaches each process once, and nothing kills them while
# they save. 300 s before the time limit all ranks get SIGTERM, agree to stop at the end of the step, save, and exit
# with 0; this script then asks for the job to be queued again, and goes on with --resume. Give the time that a step
# and a checkpoint take, and more, to --signal.
#
# It asks for another run of the job only where the one before left a new checkpoint: what fails at the same step each
# time (a loss that is not finite, a disk that is full) ends, with alcoda's exit code, and does not queue for ever.
#SBATCH --job-name=alcoda
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=alcoda-%j.log
set -u
if [ $# -lt 2 ]; then
    echo "usage: sbatch docs/slurm.sh RECIPE RUN_FOLDER [more of alcoda train]" >&2
    exit 2
fi
recipe=$1 out=$2
shift 2
python=${PYTHON:-python}

# running, stopped, finished or failed; nothing where no run was begun.
status() {
    [ -f "$out/run.json" ] && "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["status"])' "$out/run.json"
}
newest_checkpoint() {
    ls "$out/checkpoints" 2>/dev/null | grep -E '^step_[0-9]{8}$' | sort | tail -n 1
}

if [ "$(status)" = finished ]; then
    echo "$out is finished already"
    exit 0
fi
more=()
[ -f "$out/recipe.yaml" ] && more=(--resume)
before=$(newest_checkpoint)

# What torchrun would set.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
# A rank that fails takes the others with it.
srun --kill-on-bad-exit=1 bash -c \
    'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$@"' \
    alcoda "$python" -m alcoda train "$recipe" --out "$out" "${more[@]}" "$@"
code=$?

now=$(status)
if [ "$code" -eq 0 ] && [ "$now" = finished ]; then
    exit 0
fi
if [ "$code" -eq 2 ]; then
    echo "asked wrongly: see above" >&2
    exit 2
fi
if [ "$(newest_checkpoint)" = "$before" ]; then
    echo "no new checkpoint (exit code $code, status ${now:-none}): not queued again" >&2
    [ "$code" -eq 0 ] && code=1
    exit "$code"
fi
echo "exit code $code, status ${now:-none}: queued again, to go on from $(newest_checkpoint)"
scontrol requeue "$SLURM_JOB_ID"
