{% import "roles.jinja" as role with context %}
#!/usr/bin/env bash
# Written by `anysearch cluster --target=slurm`. Submit it from this folder:
#   sbatch {{ file | quote }}
# It reads your keys from a file that only you should be able to read, and queues
# itself again when the run has saved and stopped (exit code 75).
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ flags.nodes }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={{ folder | sbatch }}/slurm-%j.log
#SBATCH --signal=B:TERM@600
# Whole nodes: without these a task may get one core and little memory.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node={{ flags.gpus }}
# shellcheck disable=SC2034,SC2317,SC2329  # Steps use these by name.
set -uo pipefail
shopt -s inherit_errexit

keys=${ANYSEARCH_KEYS:-$HOME/.anysearch_keys}
set -a
# shellcheck source=/dev/null
[ ! -e "$keys" ] || . "$keys"
drawn=({{ drawn | join(" ") }})  # Secrets between the steps of this job.
for name in "${drawn[@]}"; do
  declare -x "$name=${!name:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}"
done
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{% include "nodes.sh" %}
# Is there once a trainer has ended with 75.
resumes={{ folder | quote }}/resumes-$SLURM_JOB_ID
set +a
rm -f "$resumes"

trainer() {
  trap : TERM  # A signal is for the command, which this waits for.
  local rank=$SLURM_PROCID code
  {% if has_retriever %}
  await_retriever
  {% endif %}
  {{ role.trainer() }}
  code=$?
  # JAX itself ends a process that misses another one by 134.
  if [ "$code" = 75 ] || [ "$code" = 134 ]; then
    touch "$resumes"
    code=75
  fi
  exit "$code"
}
{% if has_retriever %}
retriever() {
  trap exit TERM
  for _ in {0..5}; do {{ role.retriever() }}; done
}
{% endif %}
# Runs a role on some nodes, from the one with an index on, as a step. Ends what
# is left some seconds after its first task ended; 0: never. One task that ended
# must not end the others, which may be saving.
step() {
  local role=$1 from=$2 count=$3 rest=$4
  srun --overlap --job-name="${role%% *}" --nodes="$count" --ntasks="$count" \
    --kill-on-bad-exit=0 --wait="$rest" \
    --nodelist="$(IFS=, && echo "${hosts[*]:from:count}")" \
    bash -c "$(declare -f); $role"
}
# Passes a signal to a step's tasks; srun itself would kill them.
tell() {
  squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' |
    while read -r step name; do
      [ "$name" != "$1" ] || scancel --signal=TERM "$step"
    done
}

{% if shares %}
step 'servers true' {{ trainers }} {{ samplers }} 0 &
{% endif %}
{% if has_retriever %}
step retriever 0 1 0 &
{% endif %}
# One that is stopped, or hangs, does not end with the others.
step trainer 0 {{ trainers }} 1200 &
training=$!
# Near the time limit trainers save, which may need the other roles.
trap 'asked=yes; tell trainer' TERM
asked=yes
while [ "$asked" ]; do  # A signal ends the wait as well.
  asked=
  wait "$training"
  code=$?
done
tell servers
tell retriever
for _ in {1..12}; do  # What is stopped, or hangs, ends with the job.
  if [ "$(jobs -rp)" ]; then sleep 5; fi
done
if [ "$code" = 75 ] || { [ "$code" != 0 ] && [ -e "$resumes" ]; }; then
  echo "saved and stopped; queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
