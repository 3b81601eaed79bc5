"""Training on a node: its parts and their GPUs, and small runs.

The last tests start a real SGLang server and a real vLLM server
(`tests/support/real_vllm.py`). The first skips where there is no command:

    export ANYSEARCH_SGLANG_COMMAND="python -m sglang.launch_server ..."

with {model} and {port} in it, and what the machine needs: --device cpu,
--dtype float32.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

import commands
import pytest
import real_vllm
import small_policy
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import node
from anysearch_jax.methods import systems
from anysearch_jax.policy import decoder, hf
from anysearch_jax.rollout.servers import sglang

ROOT = pathlib.Path(__file__).resolve().parents[2]
SGLANG = os.environ.get("ANYSEARCH_SGLANG_COMMAND", "")


def paper(preset="", **mesh):
  """Returns the paper's configuration without its retriever."""
  config = launch_flags.load_config(f"configs/qwen2_5_7b.py{preset}")
  return config_lib.changed(
    config, mesh=mesh, retrieval=config_lib.RetrievalConfig()
  )


def resolved(config, part):
  """Returns the configuration that the trainer reads from its flags."""
  prefix = "--config."
  return launch_flags.override(
    config,
    [w.removeprefix(prefix) for w in part.command if w.startswith(prefix)],
  )


def test_the_papers_node_is_two_servers_and_a_trainer():
  config = paper()
  services, trainer = node.run_parts(
    config,
    ["python", "-m", "anysearch_jax.launch.train"],
    serves=True,
  )
  assert [part.name for part in services] == ["server-0", "server-1"]
  assert [
    part.env["CUDA_VISIBLE_DEVICES"] for part in (*services, trainer)
  ] == ["4,5", "6,7", "0,1,2,3"]
  assert (
    services[0]
    .shell_text()
    .startswith(
      "CUDA_VISIBLE_DEVICES=4,5 HOST=127.0.0.1 "
      "PYTHON=.venv-sglang/bin/python TP=2 STATIC=0.6 CONTEXT=8192 "
      "launch/serve_sglang.sh models/Qwen2.5-7B-Instruct 30000"
    )
  )
  urls = ("http://127.0.0.1:30000", "http://127.0.0.1:30001")
  assert [part.health for part in services] == [f"{u}/health" for u in urls]
  assert trainer.command[:3] == ("python", "-m", "anysearch_jax.launch.train")
  mesh = {"trainer": (0, 1, 2, 3), "rollout": ()}
  assert resolved(config, trainer) == config_lib.changed(
    config, engine={"kind": "sglang"}, servers={"urls": urls}, mesh=mesh
  )


@pytest.mark.parametrize("serves", [True, False])
def test_an_index_is_served_beside_the_trainer(serves):
  index = {"kind": "index", "index": "indexes/e5", "encoder": "models/e5"}
  config = config_lib.changed(paper(), retrieval=index)
  services, trainer = node.run_parts(
    config, [], serves=serves, retriever_port=8123
  )
  retriever = services[0]
  assert retriever.command[1:] == (
    *(
      "-m",
      "anysearch_jax.launch.serve_retriever",
      "--index=indexes/e5",
      "--port=8123",
    ),
    "--encoder=models/e5",
  )
  assert retriever.health == "http://127.0.0.1:8123/health"
  # It leaves the GPUs to the others.
  assert retriever.env["CUDA_VISIBLE_DEVICES"] == ""
  assert resolved(config, trainer).retrieval == config_lib.RetrievalConfig(
    kind="http", url="http://127.0.0.1:8123"
  )


def test_the_script_starts_the_server_that_its_settings_say(monkeypatch):
  monkeypatch.setenv("PYTHON", "/bin/echo")
  monkeypatch.setenv("STATIC", "0.5")
  config = paper(rollout=(4, 5, 6, 7))
  services, _ = node.run_parts(config, [], serves=True, port=31000)
  said = subprocess.run(
    services[1].command,
    cwd=ROOT,
    env={**os.environ, **services[1].env},
    check=True,
    capture_output=True,
    text=True,
  )
  assert said.stdout.split() == [
    *("-m", "sglang.launch_server", "--model-path", config.policy),
    *("--host", "127.0.0.1", "--port", "31001", "--tp-size", "2"),
    *("--mem-fraction-static", "0.5"),
    # A few tokens of its context are the server's own.
    *("--context-length", "8200", "--dtype", "bfloat16"),
    *("--sampling-defaults", "openai", "--dtype", "bfloat16"),
  ]


@pytest.mark.parametrize(
  ("mesh", "servers", "gpus"),
  [
    ({}, {"servers": 1}, ["4,5,6,7", "0,1,2,3"]),
    ({"rollout": (7,)}, {}, ["7", "0,1,2,3"]),
    ({"trainer": (6, 7), "rollout": (0, 3)}, {}, ["0,3", "6,7"]),
    # Training takes the first ones where none are named.
    ({"trainer": (), "fsdp": 1}, {}, ["4,5", "6,7", "0,1"]),
    ({}, {"servers": 0}, ["0,1,2,3"]),
  ],
)
def test_every_gpu_has_one_part(mesh, servers, gpus):
  config = paper(**mesh)
  services, trainer = node.run_parts(config, [], serves=True, **servers)
  parts = [*services, trainer]
  assert [part.env["CUDA_VISIBLE_DEVICES"] for part in parts] == gpus
  for part in services:
    size = len(part.env["CUDA_VISIBLE_DEVICES"].split(","))
    assert part.env["TP"] == str(size)
  seen = gpus[-1].split(",")
  # The trainer counts what it sees from 0.
  assert resolved(config, trainer).mesh.trainer == tuple(range(len(seen)))


@pytest.mark.parametrize(
  ("rollout", "count", "gpus"),
  [((), None, ["0", "1", "2", "3"]), ((), 2, ["0,1", "2,3"]), ((3,), 1, ["3"])],
)
def test_servers_on_the_trainers_gpus_give_memory_back(rollout, count, gpus):
  config = config_lib.changed(
    paper(rollout=rollout),
    engine={"kind": "sglang"},
    servers={"colocated": True},
    pipeline={"async_level": 0, "offload": "state"},
  )
  services, trainer = node.run_parts(config, [], serves=True, servers=count)
  services = services[1:] if services[0].name == "retriever" else services
  assert [part.env["CUDA_VISIBLE_DEVICES"] for part in services] == gpus
  assert {part.command[-1] for part in services} == {"--enable-memory-saver"}
  # XLA's own pool would keep what training frees.
  assert trainer.shell_text().startswith(
    "CUDA_VISIBLE_DEVICES=0,1,2,3 XLA_PYTHON_CLIENT_ALLOCATOR=platform"
  )
  systems.validate(node.trainer_config(config, serves=True))


def test_servers_of_a_run_with_adapters_load_them():
  config = config_lib.changed(paper(), lora={"rank": 8, "targets": ("q", "v")})
  services, _ = node.run_parts(config, [], serves=True, servers=1)
  expected = sglang.adapter_flags(8, ("q", "v"))
  assert [*services[-1].command[-len(expected) :]] == expected


def test_servers_of_the_other_kind_have_its_script_and_flags():
  config = config_lib.changed(
    paper(),
    engine={"kind": "vllm"},
    lora={"rank": 12, "targets": ("q", "v")},
    servers={"colocated": True},
    objective={"router": "replay"},
  )
  services, trainer = node.run_parts(config, [], serves=True, servers=2)
  assert (
    services[0]
    .shell_text()
    .startswith(
      "CUDA_VISIBLE_DEVICES=4,5 HOST=127.0.0.1 "
      "PYTHON=.venv-vllm/bin/python TP=2 STATIC=0.6 CONTEXT=8192 "
      "launch/serve_vllm.sh models/Qwen2.5-7B-Instruct 30000"
    )
  )
  assert services[0].command[3:] == (
    *("--dtype", "bfloat16", "--enable-sleep-mode"),
    "--enable-return-routed-experts",
    *("--enable-lora", "--max-lora-rank", "16", "--max-loras", "3"),
    *("--lora-target-modules", "q_proj", "v_proj"),
  )
  assert resolved(config, trainer).engine.kind == "vllm"


@pytest.mark.parametrize(
  ("flags", "sentence"),
  [
    (["--config.engine.kind=jax"], "--server=vllm: found --config.engine.kind"),
    (["--target=slurm"], "--target: found vLLM servers, expected SGLang's"),
  ],
)
def test_flags_that_contradict_the_kind_of_server_are_refused(
  tmp_path, flags, sentence
):
  refused, _ = command(
    *("--config=configs/qwen2_5_7b.py", "--server=vllm", *flags),
    f"--output={tmp_path / 'run'}",
  )
  assert sentence in refused


def test_a_flag_chooses_the_kind_of_server(tmp_path):
  ended, said = command(
    *("--config=configs/qwen2_5_7b.py", "--server=vllm", "--dry_run"),
    f"--output={tmp_path / 'run'}",
  )
  assert ended == 0
  assert "launch/serve_vllm.sh" in said and "sglang" not in said
  assert "--config.engine.kind=vllm" in said


def test_hosts_of_servers_follow_the_folder_of_deltas():
  deltas = {"deltas": True, "weights": "/shared/weights"}
  config = config_lib.changed(paper(), servers=deltas)
  services, _ = node.run_parts(config, [], serves=True, servers=1)
  assert services[-1].env["DELTAS"] == "/shared/weights"


def test_servers_of_other_nodes_are_only_named():
  config = dataclasses.replace(
    paper(), servers=config_lib.ServersConfig(urls=("http://a:1", "http://b:1"))
  )
  services, trainer = node.run_parts(config, [], serves=True, servers=0)
  assert services == []
  assert resolved(config, trainer).servers.urls == config.servers.urls
  assert resolved(config, trainer).engine.kind == "sglang"
  # A trainer that samples itself keeps its command.
  services, trainer = node.run_parts(config, ["train", "--x=1"], serves=False)
  assert services == []
  assert (trainer.command, trainer.env) == (("train", "--x=1"), {})


@pytest.mark.parametrize(
  ("config", "assignments", "expected"),
  [
    ("configs/qwen2_5_7b.py", [], True),
    ("configs/qwen2_5_7b.py", ["engine.kind=jax"], False),
    ("configs/qwen2_5_7b.py:lora80", [], False),
    ("configs/qwen2_5_7b.py:lora80", ["engine.kind=sglang"], True),
    ("configs/quickstart.py", ["mesh.trainer=0", "mesh.rollout=0"], False),
  ],
)
def test_servers_sample_where_they_have_gpus(config, assignments, expected):
  config = launch_flags.override(launch_flags.load_config(config), assignments)
  assert node.samples_by_servers(config, assignments) is expected


@pytest.mark.parametrize(
  ("mesh", "servers", "sentence"),
  [
    ({}, {"servers": 3}, "found 3 for the 4 GPUs of mesh.rollout"),
    ({"rollout": ()}, {}, "mesh.rollout: found no GPUs for the servers"),
    ({"rollout": (3, 4)}, {}, "the trainer's, or servers.colocated=true"),
  ],
)
def test_impossible_parts_are_refused(mesh, servers, sentence):
  with pytest.raises(ValueError, match=sentence):
    node.run_parts(paper(**mesh), [], serves=True, **servers)


# Answers only /health, and reports the devices that it was given.
SERVER = """
import http.server, os, sys
flags = dict(zip(sys.argv, sys.argv[1:]))
print(flags["--tp-size"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200 if self.path == "/health" else 404)
    self.end_headers()
address = "127.0.0.1", int(flags["--port"])
http.server.HTTPServer(address, Handler).serve_forever()
"""


def _stands_in(folder, code):
  """Returns a program that runs Python code in place of a server."""
  file = folder / "python"
  file.write_text(f"#!{sys.executable}\n{code}")
  file.chmod(0o755)
  return str(file)


def command(*arguments):
  return commands.printed(node, *map(str, arguments))


def make(folder, rollout=(), policy=None):
  """Makes a policy and a configuration that trains within seconds."""
  hf.save(folder / "policy", policy or small_run.parts()["policy"])
  config = config_lib.changed(
    small_run.CONFIG,
    policy=str(folder / "policy"),
    curriculum={"phase1_steps": 0, "total_steps": 4},
    mesh=config_lib.MeshConfig(trainer=(0,), rollout=rollout),
  )
  return commands.config_file(folder / "config.py", config)


@pytest.fixture
def ports():
  """Returns the first of two consecutive free ports."""
  while True:
    with socket.create_server(("127.0.0.1", 0)) as first:
      port = first.getsockname()[1]
    with socket.socket() as second:
      if second.connect_ex(("127.0.0.1", port + 1)):
        return port


def test_a_dry_run_prints_commands_and_starts_nothing(tmp_path):
  output = tmp_path / "run"
  ended, said = command(
    *("--config=configs/qwen2_5_7b.py", "--config.seed=7", "--threads=3"),
    *("--servers=1", "--dry_run", f"--output={output}"),
  )
  assert ended == 0
  assert not output.exists()
  assert "--index=indexes/e5" in said
  assert f"# server-0, log {output}/logs/server-0.log; ready when" in said
  lines = [line.strip().rstrip("\\ ") for line in said.splitlines()]
  start = lines.index(
    f"CUDA_VISIBLE_DEVICES=0,1,2,3 {sys.executable} "
    "-m anysearch_jax.launch.train"
  )
  assert lines[start + 1 :] == [
    *("--config=configs/qwen2_5_7b.py", "--config.seed=7"),
    *(f"--output={output}", "--threads=3", "--config.retrieval.kind=http"),
    "--config.retrieval.url=http://127.0.0.1:8000",
    *("--config.retrieval.index=", "--config.retrieval.encoder="),
    "--config.engine.kind=sglang",
    "--config.servers.urls=http://127.0.0.1:30000",
    *("--config.mesh.trainer=0,1,2,3", "'--config.mesh.rollout=()'"),
  ]


@pytest.mark.parametrize(
  ("flags", "sentence"),
  [
    (
      ["--config=configs/qwen2_5_7b.py", "--config.policy=nowhere"],
      "policy: found no config.json",
    ),
    (
      ["--config=configs/quickstart.py", "--config.group=3"],
      "16 questions x 3 samples = 48 trajectories do not divide into 5",
    ),
  ],
)
def test_a_configuration_that_cannot_run_starts_nothing(
  tmp_path, flags, sentence
):
  refused, _ = command(*flags, f"--output={tmp_path / 'run'}")
  assert refused.startswith(f"anysearch node: {sentence}")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_on_a_cpu_it_trains(tmp_path):
  output = tmp_path / "run"
  ended, said = command(make(tmp_path), f"--output={output}", "--cache=")
  assert ended == 0, said
  first, *progress, last = said.splitlines()
  assert first == f"[trainer] starts; log: {output / 'logs' / 'trainer.log'}"
  assert "\nrollout 2/2 " in (output / "logs" / "trainer.log").read_text()
  assert progress[-1] == f"[trainer] trained policy: {output / 'policy'}"
  assert last.startswith("[trainer] ended after ")
  assert (output / "policy" / "config.json").is_file()


def test_a_trainer_that_refuses_stops_the_servers(tmp_path, ports, monkeypatch):
  monkeypatch.setenv("PYTHON", _stands_in(tmp_path, SERVER))
  ended, said = command(
    make(tmp_path, rollout=(4, 5, 6, 7)),
    "--config.episode.max_context=9",
    f"--port={ports}",
    f"--output={tmp_path / 'run'}",
  )
  assert ended == 1
  for index, gpus in enumerate(["4,5", "6,7"]):
    assert f"[server-{index}] ready after " in said
    log = (tmp_path / "run" / "logs" / f"server-{index}.log").read_text()
    assert f"2 {gpus}" in log
    with socket.socket() as gone:
      assert gone.connect_ex(("127.0.0.1", ports + index)) != 0
  assert "[trainer] failed with code 1" in said
  assert "anysearch train: episode.max_context: found 9, expected more" in said


@pytest.mark.skipif(
  not SGLANG,
  reason="no SGLang; set ANYSEARCH_SGLANG_COMMAND as the module says",
)
def test_real_servers_sample_and_the_trainer_trains(
  tmp_path, ports, monkeypatch
):
  code = f"""
import os, shlex, sys
flags = dict(zip(sys.argv, sys.argv[1:]))
words = {SGLANG!r}.format(model=flags["--model-path"], port=flags["--port"])
os.execvp("env", ["env", *shlex.split(words)])
"""
  monkeypatch.setenv("PYTHON", _stands_in(tmp_path, code))
  output = tmp_path / "run"
  ended, said = command(
    make(tmp_path, rollout=(1,)),
    f"--config.servers.weights={tmp_path}",
    f"--port={ports}",
    f"--output={output}",
    "--cache=",
  )
  assert ended == 0, said
  assert "[server-0] ready after " in said
  # 8 trajectories a rollout have been asked for, by HTTP.
  log = (output / "logs" / "server-0.log").read_text()
  assert log.count("POST /generate") >= 16
  lines = (output / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["rollout/failed"] for line in lines] == [0, 0]


@real_vllm.running
@pytest.mark.slow
def test_real_vllm_servers_sample_and_the_trainer_trains(
  tmp_path, ports, monkeypatch
):
  code = f"""
import os, sys
words = [{real_vllm.PYTHON!r}, *sys.argv[1:], "--enforce-eager"]
os.execvp(words[0], words)
"""
  for name, value in real_vllm.environment().items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv("PYTHON", _stands_in(tmp_path, code))
  bare = small_run.parts()["policy"]
  a = small_policy.qwen3(
    bare.architecture.vocab_size,
    d_model=64,
    head_dim=32,
    mlp_dim=96,
    tied=False,
  )
  policy = bare._replace(params=decoder.initialize(a, 0), architecture=a)
  output = tmp_path / "run"
  ended, said = command(
    make(tmp_path, rollout=(1,), policy=policy),
    "--server=vllm",
    f"--config.servers.weights={tmp_path}",
    f"--port={ports}",
    f"--output={output}",
    "--cache=",
  )
  assert ended == 0, said
  assert "[server-0] ready after " in said
  first, second = small_run.records(output)
  server = f"engine/server/127.0.0.1:{ports}"
  for line in (first, second):
    assert line["rollout/failed"] == 0
    assert line[f"{server}/turns"] >= 8
    # The trainer's own scores, of the weights that it handed over.
    assert line[f"{server}/fingerprint"] < 1e-3
  assert (output / "policy" / "config.json").is_file()
