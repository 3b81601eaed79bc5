#!/usr/bin/env bash
# Written by `anysearch cluster --target=slurm`. Submit it from this folder:
#   sbatch @FILE@
# It makes keys at first, in a file that only you can read, and queues itself
# again when the run has saved and stopped (exit code 75).
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@PLACE@/slurm-%j.log
#SBATCH --signal=B:TERM@600
# Whole nodes: without these a task may get one core and little memory.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=@GPUS@
set -uo pipefail
shopt -s inherit_errexit

keys=${ANYSEARCH_KEYS:-$HOME/.anysearch_keys}
if [ ! -e "$keys" ]; then
  new=$(mktemp "$keys.XXXXXX")
  for name in CONTROLLER_KEY SGLANG_KEY; do
    echo "$name=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
  done >"$new"
  mv -n "$new" "$keys"
fi
set -a
# shellcheck source=/dev/null
. "$keys"
set +a

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
trainers=@TRAINERS@ samplers=@SAMPLERS@
# Is there once a task has ended with 75.
resumes=@PLACE@/resumes-$SLURM_JOB_ID
rm -f "$resumes"
# Starts the parts of some nodes, from the one with an index on, as a step. Ends
# what is left some seconds after its first task ended; 0: never.
nodes() {
  local name=$1 first=$2 count=$3 rest=$4
  # Each task knows its own number. One that ended must not end the others,
  # which may be saving.
  # shellcheck disable=SC2016
  srun --overlap --job-name="$name" --nodes="$count" --ntasks="$count" \
    --kill-on-bad-exit=0 --wait="$rest" \
    --nodelist="$(cut -d, -f"$((first + 1))-$((first + count))" <<<"$hosts")" \
    bash -c 'trap : TERM  # A signal is for the command, which this waits for.
      @QUOTED@ --hosts="$1" --rank=$(($2 + SLURM_PROCID))
      code=$?; [ "$code" != 75 ] || touch "$3"; exit "$code"' \
    node "$hosts" "$first" "$resumes"
}
# Passes a signal to a step's tasks; srun itself would kill them.
tell() {
  squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' |
    while read -r step name; do
      [ "$name" != "$1" ] || scancel --signal=TERM "$step"
    done
}

sampling=
if [ "$samplers" -gt 0 ]; then
  nodes sampling "$trainers" "$samplers" 0 &
  sampling=$!
fi
# One that is stopped, or hangs, does not end with the others.
nodes training 0 "$trainers" 1200 &
training=$!
# Near the time limit trainers save, which may need samplers that answer.
trap 'asked=yes; tell training' TERM
asked=yes
while [ "$asked" ]; do  # A signal ends the wait as well.
  asked=
  wait "$training"
  code=$?
done
if [ -n "$sampling" ]; then
  tell sampling
  for _ in {1..12}; do  # One that is stopped, or hangs, ends with the job.
    if kill -0 "$sampling" 2>/dev/null; then sleep 5; fi
  done
fi
if [ "$code" = 75 ] || { [ "$code" != 0 ] && [ -e "$resumes" ]; }; then
  echo "saved and stopped; queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
