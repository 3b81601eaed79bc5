"""The command for a node: small runs, and errors that start nothing.

The last test starts a real SGLang server; it skips where there is no command:

    export ANYSEARCH_SGLANG_COMMAND="python -m sglang.launch_server ..."

with {model} and {port} in it, and what the machine needs: --device cpu,
--dtype float32.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import small_run

from anysearch_jax.policy import hf

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 420  # Seconds; a loaded machine is slow.
SGLANG = os.environ.get("ANYSEARCH_SGLANG_COMMAND", "")
CONFIG = """
from anysearch_jax import config as c

def get_config():
  return c.ExperimentConfig(
    name="small",
    policy={policy!r},
    compute_dtype="float32",
    questions=4,
    group=2,
    save_every=1,
    curriculum=c.CurriculumConfig(
      max_budget=2, phase1_steps=0, total_steps=4, steps_per_rollout=2, window=4
    ),
    episode=c.EpisodeConfig(
      prompts="world", max_generated=24, max_context=110
    ),
    engine={engine},
    batch=c.BatchConfig(
      row_lengths=(128,), micro_batch_tokens=512, max_micro_batches=4
    ),
    mesh=c.MeshConfig(trainer=(0,), rollout={rollout}),
  )
"""
# Answers only /health, and reports the devices that it was given.
SERVER = """
import http.server, os, sys
print(sys.argv[2:], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200 if self.path == "/health" else 404)
    self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(*arguments):
  """Runs `launch.node`; returns its exit code and output."""
  done = subprocess.run(
    [sys.executable, "-m", "launch.node", *map(str, arguments)],
    cwd=ROOT,
    env=os.environ
    | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=DEADLINE,
  )
  return done.returncode, done.stdout


def make(folder, *, rollout=(), engine="c.EngineConfig()"):
  """Makes a policy and a configuration that trains within seconds."""
  hf.save(folder / "policy", small_run.parts()["policy"])
  path = folder / "config.py"
  path.write_text(
    CONFIG.format(policy=str(folder / "policy"), rollout=rollout, engine=engine)
  )
  return f"--config={path}"


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
  code, said = command(
    "--config=configs/qwen2_5_7b.py",
    "--config.seed=7",
    "--threads=3",
    "--servers=1",
    "--dry_run",
    f"--output={output}",
  )
  assert code == 0
  assert not output.exists()
  assert "--index=indexes/e5" in said
  assert f"# server-0, log {output}/logs/server-0.log; ready when" in said
  lines = [
    line.strip().removesuffix("\\").strip() for line in said.splitlines()
  ]
  start = lines.index(
    f"CUDA_VISIBLE_DEVICES=0,1,2,3 {sys.executable} -m launch.train"
  )
  assert lines[start + 1 :] == [
    "--config=configs/qwen2_5_7b.py",
    "--config.seed=7",
    f"--output={output}",
    "--threads=3",
    "--config.retrieval.kind=http",
    "--config.retrieval.url=http://127.0.0.1:8000",
    "--config.retrieval.index=",
    "--config.retrieval.encoder=",
    "--config.engine.kind=sglang",
    "--config.sglang.urls=http://127.0.0.1:30000",
    "--config.mesh.trainer=0,1,2,3",
    "'--config.mesh.rollout=()'",
  ]


def test_a_policy_that_is_not_there_starts_nothing(tmp_path):
  code, said = command(
    "--config=configs/qwen2_5_7b.py",
    f"--config.policy={tmp_path}",
    f"--output={tmp_path / 'run'}",
  )
  assert code == 1
  assert "launch.node: policy: found no config.json" in said
  assert not (tmp_path / "run").exists()


def test_on_a_cpu_it_trains(tmp_path):
  output = tmp_path / "run"
  engine = "c.EngineConfig(slots=8)"
  code, said = command(
    make(tmp_path, engine=engine), f"--output={output}", "--cache="
  )
  assert code == 0, said
  first, *progress, last = said.splitlines()
  assert first == f"[trainer] starts; log: {output / 'logs' / 'trainer.log'}"
  assert "\nrollout 2/2 " in (output / "logs" / "trainer.log").read_text()
  assert progress[-1] == f"[trainer] trained policy: {output / 'policy'}"
  assert last.startswith("[trainer] ended after ")
  assert (output / "policy" / "config.json").is_file()


def test_a_configuration_that_cannot_run_starts_nothing(tmp_path):
  code, said = command(
    make(tmp_path, rollout=(4, 5, 6, 7)),
    "--config.questions=1",
    "--config.group=3",
    f"--output={tmp_path / 'run'}",
  )
  assert code == 1
  assert said.strip() == (
    "launch.node: 1 questions x 3 samples = 3 trajectories do not divide into "
    "2 batches (curriculum.steps_per_rollout / curriculum.epochs)."
  )
  assert not (tmp_path / "run").exists()


def test_a_trainer_that_refuses_stops_the_servers(tmp_path, ports):
  script = tmp_path / "server.py"
  script.write_text(SERVER)
  code, said = command(
    make(tmp_path, rollout=(4, 5, 6, 7)),
    "--config.episode.max_context=9",
    f"--server_command={sys.executable} {script} {{port}} {{gpus}} {{tp}}",
    f"--port={ports}",
    f"--log_dir={tmp_path / 'logs'}",
    f"--output={tmp_path / 'run'}",
  )
  assert code == 1
  for index, gpus in enumerate(["4,5", "6,7"]):
    assert f"[server-{index}] ready after " in said
    log = (tmp_path / "logs" / f"server-{index}.log").read_text()
    assert f"['{gpus}', '2'] {gpus}" in log
    with socket.socket() as gone:
      assert gone.connect_ex(("127.0.0.1", ports + index)) != 0
  assert "[trainer] failed with code 1" in said
  assert "launch.train: episode.max_context: found 9, expected more" in said


@pytest.mark.skipif(
  not SGLANG,
  reason="no SGLang; set ANYSEARCH_SGLANG_COMMAND as the module says",
)
def test_real_servers_sample_and_the_trainer_trains(tmp_path, ports):
  output = tmp_path / "run"
  code, said = command(
    make(tmp_path, rollout=(1,)),
    f"--config.sglang.weights={tmp_path}",
    f"--server_command={SGLANG}",
    f"--port={ports}",
    f"--output={output}",
    "--cache=",
  )
  assert code == 0, said
  assert "[server-0] ready after " in said
  # 8 trajectories a rollout have been asked for, by HTTP.
  log = (output / "logs" / "server-0.log").read_text()
  assert log.count("POST /generate") >= 16
  lines = (output / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["rollout/failed"] for line in lines] == [0, 0]
