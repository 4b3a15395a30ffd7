#!/bin/bash
# One run on several machines under SLURM: sbatch configs/cluster/slurm.sh [options of hfgolf train]
# The repository, its virtual environment, the token cache (HF_HOME) and runs/ are on a disk that all machines share.
# Change what begins with #SBATCH to your cluster. PROCESSES is the number of processes per machine; default: its GPUs.
#SBATCH --job-name=hfgolf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -euo pipefail

# Five minutes before the time limit: all processes save and end, and the job goes back to the queue. A preempted job is
# put back by SLURM itself. Either way, it goes on from its last checkpoint.
is_stopped=
trap 'is_stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}  # not by | head, which ends scontrol by SIGPIPE, and with pipefail the job
srun --kill-on-bad-exit torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${PROCESSES:-gpu}" \
    --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$head:$((20000 + SLURM_JOB_ID % 10000))" \
    scripts/train.py --config configs/fineweb_124m.yaml --train.resume auto "$@" &
status=0
wait $! || status=$?
[ -z "$is_stopped" ] || { wait $! || true; scontrol requeue "$SLURM_JOB_ID"; exit 0; }
exit $status
