#!/usr/bin/env bash
# A vLLM server that samples for training, in the environment of
# launch/requirements-vllm.txt:
#   launch/serve_vllm.sh MODEL_DIR [PORT] [more flags of vllm serve]
# Settings, by environment: PYTHON (of that environment), HOST, TP (GPUs that
# the policy is cut over), STATIC (share of their memory for weights and KV
# cache), CONTEXT (episode.max_context), CUDA_VISIBLE_DEVICES. A server on the
# trainer's GPU (servers.colocated) needs the flag --enable-sleep-mode. A run
# that trains adapters (lora.rank) sends only them to servers started with LORA,
# that rank.
# Whoever reaches a server can give it other weights, call its methods and read
# its host's files: its control routes ask for no key, not even with --api-key.
# So it listens on this machine's loopback; name another HOST only in a network
# that nobody else can reach.
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: $0 MODEL_DIR [PORT] [flags of vllm serve]" >&2
  exit 2
fi
model=$1
port=${2:-30000}
shift $(($# < 2 ? $# : 2))
host=${HOST:-127.0.0.1}
if [[ ! $host =~ ^(127\..*|localhost|::1)$ ]]; then
  echo "$0: whoever reaches $host:$port controls this server; its control" \
    "routes ask for no key." >&2
fi

adapters=()
if [ -n "${LORA:-}" ]; then  # Servers take some ranks only.
  for rank in 8 16 32 64 128 256 320 512; do
    [ "$rank" -lt "$LORA" ] || break
  done
  adapters=(--enable-lora --max-lora-rank "$rank" --max-loras 3
    --lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj)
fi

export VLLM_SERVER_DEV_MODE=1  # The routes that pause, load, name and sleep.
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
export VLLM_MAX_STOP_STRINGS=${VLLM_MAX_STOP_STRINGS:-64}  # Tags of all tools.

# Left as they are: prefix caching (turns of an episode and samples of a question
# share prefixes by it) and the tokenizer (stop texts need it).
exec "${PYTHON:-.venv-vllm/bin/python}" -m vllm.entrypoints.cli.main serve \
  "$model" \
  --host "$host" \
  --port "$port" \
  --tensor-parallel-size "${TP:-1}" \
  --gpu-memory-utilization "${STATIC:-0.6}" \
  --max-model-len "${CONTEXT:-32768}" \
  --dtype bfloat16 \
  --enable-scale-out \
  --logprobs-mode processed_logprobs \
  --enable-prompt-tokens-details \
  --disable-uvicorn-access-log \
  ${adapters[@]+"${adapters[@]}"} \
  "$@"
