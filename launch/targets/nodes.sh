{% import "roles.jinja" as role with context %}
# hosts: names of the nodes, an array; those that train come first.
first=${hosts[0]}
{% if has_retriever %}
retriever=$first  # Its name; trainers wait half an hour for it.
await_retriever() {
  for _ in {1..900}; do
    ! timeout 5 bash -c ": >/dev/tcp/$retriever/8000" 2>/dev/null || break
    sleep 2
  done
}
{% endif %}
{% if shares %}
urls=
for host in "${hosts[@]:{{ trainers }}}"; do
  for port in $(seq {{ port }} {{ port + shares | length - 1 }}); do
    urls+=",http://$host:$port"
  done
done
urls=${urls#,}
serve() {  # Becomes a server of this node; they count from 0.
  local port=$(({{ port }} + $1)) gpus
  gpus=$(seq -s, $(($1 * {{ shares[0] | length }})) $(($1 * {{ shares[0] | length }} + {{ shares[0] | length }} - 1)))
  exec {{ server }}
}
# Runs the servers of this node, again if one ends, while a command succeeds.
servers() {
  local running=() stopped='' i pid
  trap 'stopped=yes' TERM
  KEY_FILE=$(mktemp -d)/key
  export KEY_FILE
  (umask 077 && echo "$SGLANG_KEY" >"$KEY_FILE")
  while [ ! "$stopped" ] && "$@"; do
    for i in {0..{{ shares | length - 1 }}}; do
      kill -0 "${running[i]:-none}" 2>/dev/null || {
        serve "$i" &
        running[i]=$!
      }
    done
    sleep 5
  done
  kill "${running[@]}" 2>/dev/null || true
  for pid in "${running[@]}"; do  # One that is stopped, or hangs, gets a minute.
    timeout 60 tail --pid="$pid" -f /dev/null || kill -9 "$pid" || true
  done
  rm -r "${KEY_FILE%/key}"
}
{% endif %}
