#!/usr/bin/env bash
# An SGLang server that samples for training, in the environment of
# launch/requirements-sglang.txt:
#   launch/serve_sglang.sh MODEL_DIR [PORT] [more flags of the server]
# Settings, by environment: PYTHON (of that environment), HOST, TP (GPUs that
# the policy is cut over), STATIC (share of their memory for weights and KV
# cache), CONTEXT (episode.max_context), CUDA_VISIBLE_DEVICES. A server on the
# trainer's GPU (servers.colocated) needs the flag --enable-memory-saver. A run
# that trains adapters (lora.rank) sends only them to servers started with LORA,
# that rank.
# DELTAS, the folder of servers.weights, is for a run with servers.deltas: this host
# then keeps a copy of the weights in RAM and patches it.
# Whoever reaches a server can give it other weights. So one whose HOST is not
# this machine's loopback asks for a key: the one in KEY_FILE (by default
# ~/.anysearch_sglang_key), which is made if it is missing. Servers of one run
# need the same key. With KEY_FILE set, a server on the loopback asks for it too;
# with --api-key among the flags, the server asks for that one instead.
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: $0 MODEL_DIR [PORT] [flags of sglang.launch_server]" >&2
  exit 2
fi
model=$1
port=${2:-30000}
shift $(($# < 2 ? $# : 2))
host=${HOST:-127.0.0.1}
given=
previous=
for flag in "$@"; do  # These win over what is set here.
  case $previous in --host) host=$flag ;; --api-key) given=yes ;; esac
  case $flag in --host=*) host=${flag#*=} ;; --api-key=*) given=yes ;; esac
  previous=$flag
done

secured=()
if [ -n "${KEY_FILE:-}" ] || [[ ! $host =~ ^(127\..*|localhost|::1)$ && ! $given ]]
then
  file=${KEY_FILE:-$HOME/.anysearch_sglang_key}
  if [ ! -e "$file" ]; then
    new=$(mktemp "$file.XXXXXX")  # Readable by this user alone.
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$new"
    # Where several servers start on a shared disk, the first one's key stays.
    ln "$new" "$file" 2>/dev/null || mv -n "$new" "$file"
    rm -f "$new"
  fi
  chmod go= "$file"
  key=$(<"$file")
  if [[ ! $key =~ ^[[:graph:]]+$ ]]; then
    echo "$0: $file holds no key, expected one line of printable characters" \
      "without blanks; remove it, and one is made." >&2
    exit 2
  fi
  # In a file, because every user of a machine can read a process's arguments.
  rm -f "$file.yaml"
  (umask 077 && echo "api-key: '${key//\'/\'\'}'" >"$file.yaml")
  secured=(--config "$file.yaml")
  echo "$0: this server asks for the key in $file. On the trainer's node:" >&2
  echo "    export SGLANG_KEY=\$(cat $file)" >&2
  echo "    ... --config.servers.api_key_variable=SGLANG_KEY" >&2
fi

adapters=()
if [ -n "${LORA:-}" ]; then  # Two versions, and the base.
  adapters=(--enable-lora --max-lora-rank "$LORA"
    --max-loras-per-batch 3
    --lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj)
fi

if [ -n "${DELTAS:-}" ]; then  # It ends with the server.
  package="$(dirname "$0")/.."  # Of an installed package, or of a checkout:
  [ -d "$package/rollout" ] || package="$package/anysearch_jax"
  "${PYTHON:-.venv-sglang/bin/python}" \
    "$package/rollout/servers/delta.py" "$DELTAS" &
fi

# Log-probs are to be of what was sampled from: at the sampling temperature.
unset SGLANG_RETURN_ORIGINAL_LOGPROB
# A server keeps a few tokens of its context to itself, so it gets a few more.
export SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1

# Left as they are: the radix cache (turns of an episode and samples of a
# question share prefixes by it), the warm-up (its requests compile what the
# first turns need), the tokenizer (stop texts need it).
exec "${PYTHON:-.venv-sglang/bin/python}" -m sglang.launch_server \
  --model-path "$model" \
  --host "$host" \
  --port "$port" \
  --tp-size "${TP:-1}" \
  --mem-fraction-static "${STATIC:-0.6}" \
  --context-length "$((${CONTEXT:-32768} + 8))" \
  --dtype bfloat16 \
  --sampling-defaults openai \
  ${secured[@]+"${secured[@]}"} \
  ${adapters[@]+"${adapters[@]}"} \
  "$@"
