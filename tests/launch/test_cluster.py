"""What a cluster starts: the files, and the parts of each of its nodes.

A real SLURM runs the script where `sinfo` finds one; shellcheck reads it where
it is installed.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
from concurrent import futures

import commands
import pytest
import waits
import yaml

from anysearch_jax import config as config_lib
from anysearch_jax.launch import node, shipped

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = "--config=configs/qwen2_5_7b.py"
ONE, TWO = "--config.mesh.fsdp=4", "--config.mesh.fsdp=8"  # Nodes that train.
JAX = "--config.engine.kind=jax", "--config.pipeline.async_level=1"
TASK = PAPER, ONE, "--nodes=2", "--output=run"
# Every node trains and samples.
JAX_ALONE = (
  *("--config.engine.kind=jax", "--config.pipeline.async_level=0"),
  *("--gpus=0", "--config.mesh.rollout=()", "--config.mesh.trainer=()"),
)


def written(*args):
  ended, said = commands.printed(node, *args, "--dry_run")
  assert ended == 0, ended
  return said


def test_a_trainer_finds_the_other_roles_by_name():
  script = written(PAPER, TWO, "--nodes=4", "--target=slurm", "--output=run")
  (line,) = re.findall(".*launch.train .*", script)
  words = shlex.split(line)
  expected = (
    *("--coordinator=$first:8400", "--processes=2", "--process=$rank"),
    *("--config.engine.kind=sglang", "--config.servers.urls=$urls"),
    "--config.retrieval.url=http://$retriever:8000",
    # Servers may load for as long.
    *("--config.servers.wait=1800.0", "--config.servers.weights=run/weights"),
    "--config.retrieval.key_variable=RETRIEVER_KEY",
    "--config.servers.api_key_variable=SGLANG_KEY",
  )
  assert set(expected) <= set(words)


def test_whoever_listens_to_other_nodes_asks_for_a_key():
  script = written(PAPER, TWO, "--nodes=4", "--target=slurm", "--output=run")
  (line,) = re.findall(".*launch.serve_retriever .*", script)
  assert "--host=0.0.0.0 --token_variable=RETRIEVER_KEY" in line
  (line,) = re.findall(".*serve_sglang.sh .*", script)
  assert "HOST=0.0.0.0" in shlex.split(line)
  assert "CUDA_VISIBLE_DEVICES=$gpus" in shlex.split(line)
  assert "$(seq 30000 30003)" in script


def test_without_servers_every_node_trains_and_samples():
  args = PAPER, TWO, "--nodes=4", "--target=slurm", *JAX_ALONE
  script = written(*args)
  assert "serve()" not in script and "retriever()" in script
  assert "--processes=4" in script and "servers.urls" not in script


# What the manifest may have of a JobSet (v1alpha2) and of a pod (v1), with the
# types. `!` is required; a list has items of its one type.
_TIMES = "periodSeconds", "failureThreshold", "timeoutSeconds"
_PROBE = {"httpGet": {"path": str, "port!": int}, **dict.fromkeys(_TIMES, int)}
_VOLUME = {"name!": str, "emptyDir": {"medium": str}}
_VOLUME["persistentVolumeClaim"] = {"claimName!": str}
_CONTAINER = {
  "name!": str,
  "image": str,
  "workingDir": str,
  "command": [str],
  "args": [str],
  "envFrom": [{"secretRef": {"name": str}}],
  "resources": {"limits": {"nvidia.com/gpu": str}},
  "volumeMounts": [{"name!": str, "mountPath!": str}],
  "lifecycle": {"preStop": {"exec": {"command": [str]}}},
  "startupProbe": _PROBE,
  "livenessProbe": _PROBE,
}
_POD = {
  "restartPolicy": str,
  "terminationGracePeriodSeconds": int,
  "volumes": [_VOLUME],
  "containers!": [_CONTAINER],
}
_RULE = {
  "action!": str,
  "onExitCodes": {"containerName": str, "operator!": str, "values!": [int]},
  "onPodConditions": [{"type!": str, "status": str}],
}
_JOB = {
  "completionMode": str,
  "completions": int,
  "parallelism": int,
  "backoffLimit": int,
  "podFailurePolicy": {"rules!": [_RULE]},
  "template!": {"spec": _POD},
}
_JOBSET = {
  "apiVersion!": str,
  "kind!": str,
  "metadata": {"name": str},
  "spec": {
    "network": {"enableDNSHostnames": bool, "subdomain": str},
    "successPolicy": {"operator!": str, "targetReplicatedJobs": [str]},
    "failurePolicy": {"maxRestarts": int},
    "replicatedJobs": [
      {"name!": str, "replicas": int, "template!": {"spec": _JOB}}
    ],
  },
}


def unlike(found, form, path="it"):
  """Returns how a value differs from a form such as `_JOBSET`."""
  if isinstance(form, type):
    return [] if type(found) is form else [f"{path}: {found!r}"]
  if type(found) is not type(form):
    return [f"{path}: {found!r}"]
  if isinstance(form, list):
    items = [(x, form[0], f"{path}[{i}]") for i, x in enumerate(found)]
    return [said for item in items for said in unlike(*item)]
  known = {name.rstrip("!"): inner for name, inner in form.items()}
  needs = {name.rstrip("!") for name in form if name.endswith("!")}
  said = [f"{path}.{name} is unknown" for name in found.keys() - known.keys()]
  said += [f"{path}.{name} is missing" for name in needs - found.keys()]
  for name in found.keys() & known.keys():
    said += unlike(found[name], known[name], f"{path}.{name}")
  return said


def test_the_manifest_has_the_form_of_a_jobset():
  args = "--target=jobset", "--nodes=5", "--image=me/anysearch"
  found = yaml.safe_load(written(PAPER, TWO, *args, "--output=/shared/run"))
  assert unlike(found, _JOBSET) == []
  jobs = {job["name"]: job for job in found["spec"]["replicatedJobs"]}
  trainer, server = jobs["trainer"], jobs["server"]
  specs = [job["template"]["spec"] for job in (trainer, server)]
  # Each of three nodes has four servers, which are pods of their own.
  assert [spec["completions"] for spec in specs] == [2, 12]
  pods = {
    name: job["template"]["spec"]["template"]["spec"]["containers"][0]
    for name, job in jobs.items()
  }
  assert pods["server"]["image"] == "me/anysearch"
  assert pods["server"]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
  live = pods["server"]["livenessProbe"]["httpGet"]
  assert live == {"path": "/health", "port": 30000}
  for role in ("server", "retriever"):
    *_, code = pods[role]["lifecycle"]["preStop"]["exec"]["command"]
    assert "/qwen2-5-7b-trainer-0-0.qwen2-5-7b/8400" in code
  for pod in pods.values():
    assert subprocess.run(["bash", "-n", "-c", pod["args"][0]]).returncode == 0
  script = pods["trainer"]["args"][0]
  assert "http://qwen2-5-7b-server-0-11.qwen2-5-7b:30000\n" in script
  assert "retriever=qwen2-5-7b-retriever-0-0.qwen2-5-7b\n" in script
  rules = specs[0]["podFailurePolicy"]["rules"]
  assert rules[0]["onExitCodes"]["values"] == [75, 134]
  job = trainer["template"]["spec"]
  job["completion"] = job.pop("completions")
  job["template"]["spec"]["containers"][0].pop("name")
  assert sorted(said.rpartition(".")[2] for said in unlike(found, _JOBSET)) == [
    "completion is unknown",
    "name is missing",
  ]


def test_the_task_of_skypilot_starts_again_after_75():
  found = yaml.safe_load(written(*TASK, "--target=skypilot", "--wandb"))
  assert found["num_nodes"] == 2
  assert found["resources"]["accelerators"] == "H100:8"
  assert found["resources"]["job_recovery"]["recover_on_exit_codes"] == [
    *(75, 134)
  ]
  keys = "WANDB_API_KEY", "SGLANG_KEY", "RETRIEVER_KEY"
  assert found["secrets"] == dict.fromkeys(keys)
  assert "-e '.[cuda12,wandb]'" in found["setup"]
  for script in (found["setup"], found["run"]):
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0


def test_a_job_of_one_node_runs_all_roles_on_it():
  args = PAPER, "--target=slurm", "--servers=1", "--output=run"
  script = written(*args)
  assert "anysearch_jax.launch.node --config=configs/qwen2_5_7b.py" in script
  assert "--output=run --servers=1\n" in script
  assert "serve()" not in script and "retriever()" not in script


# What ends a word or begins something else, in one of the shells and formats.
HOSTILE = (
  "a b; touch pwned #",
  "$(touch pwned)`touch pwned`",
  'it\'s "quoted" \\\\ 100%',
  "x: {y: [1, 2]} # & * ! | > %j @ ,",
  "- ${port} {{ 7 * 7 }} {% raw %}",
)


def option(words, name):
  """Returns the values that a shell passes for an option, in a command."""
  return [w.removeprefix(name) for w in words if w.startswith(name)]


def shell_commands(script):
  """Returns the words of the lines that start Python, as a shell splits."""
  lines = re.findall(".* -m anysearch_jax.launch.*", script)
  return [shlex.split(line, comments=False) for line in lines]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("target", ["slurm", "jobset", "skypilot"])
def test_values_of_a_job_file_stay_values(target, value, tmp_path):
  paths = (
    *(f"--output={value}/run", f"--config.retrieval.index={value}"),
    *(f"--config.retrieval.encoder={value}", f"--config.policy={value}"),
    f"--config.name={value.replace('/', '')}",
  )
  args = PAPER, TWO, "--nodes=4", *paths, f"--target={target}"
  if target == "jobset":
    args += f"--claim={value}", f"--image={value}"
  if target == "skypilot":
    args += (f"--accelerator={value}",)
  script = written(*args)
  if target == "slurm":
    scripts = [script]
    (line,) = re.findall("^#SBATCH --output=.*", script, re.MULTILINE)
    (log,) = shlex.split(line.removeprefix("#SBATCH --output="))
    assert log == f"{value}/run/cluster".replace("%", "%%") + "/slurm-%j.log"
  else:
    found = yaml.safe_load(script)
    if target == "skypilot":
      assert found["resources"]["accelerators"] == f"{value}:8"
      scripts = [found["run"]]
    else:
      jobs = found["spec"]["replicatedJobs"]
      pods = [job["template"]["spec"]["template"]["spec"] for job in jobs]
      containers = [pod["containers"][0] for pod in pods]
      assert {c["image"] for c in containers} == {value}
      for pod in pods:
        claim = pod["volumes"][0]["persistentVolumeClaim"]
        assert claim == {"claimName": value}
      scripts = [container["args"][0] for container in containers]
  words = [word for text in scripts for c in shell_commands(text) for word in c]
  assert option(words, "--output=") == [f"{value}/run"]
  assert set(option(words, "--index=")) == {value}
  assert set(option(words, "--config.retrieval.index=")) == {value, ""}
  for number, text in enumerate(scripts):
    file = tmp_path / f"{number}.sh"
    file.write_text(text)
    assert subprocess.run(["bash", "-n", file]).returncode == 0
  if target == "slurm" and shutil.which("shellcheck"):
    check = ["shellcheck", "--severity=warning", file]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.stdout == ""


UNWRITABLE = "\n", "\r", "\0", "\x1b", "\x85", "\u2028", "\ufeff", "\udc80"
REACH_A_FILE = (
  *("--output", "--image", "--claim", "--accelerator", "--cache"),
  *("--config.policy", "--config.retrieval.index", "--config.servers.weights"),
)


@pytest.mark.parametrize("character", UNWRITABLE)
@pytest.mark.parametrize("target", ["slurm", "jobset", "skypilot"])
def test_control_characters_in_a_job_file_are_refused(target, character):
  for flag in REACH_A_FILE:
    value = f"run{character}touch pwned"
    said = commands.run(node, *TASK, f"--target={target}", f"{flag}={value}")
    assert said.startswith(f"anysearch node: {flag}: found {value!r}"), said
    assert "\n" not in said and f"--target={target}" in said


def test_names_of_keys_in_a_job_file_are_names():
  key = "--config.retrieval.key_variable=A; touch pwned"
  said = commands.run(node, *TASK, "--target=slurm", key)
  assert "key_variable: found 'A; touch pwned'" in said


ONE_OR_TWO = [("1", "0", True), ("2", "0", False), ("2", "1", True)]


@pytest.mark.parametrize(("nodes", "rank", "serves"), ONE_OR_TWO)
def test_nodes_that_serve_install_sglang(nodes, rank, serves, tmp_path):
  args = PAPER, ONE, f"--nodes={nodes}", "--target=skypilot"
  setup = yaml.safe_load(written(*args))["setup"]
  stubs = {"pip": "", "uv": "[[ $* != *sglang.txt ]] || touch installed"}
  ended(setup, tmp_path, stubs, SKYPILOT_SETUP_NODE_RANK=rank)
  assert (tmp_path / "installed").exists() == serves


def ended(script, folder, commands, **env):
  """Runs a script with commands of its own; returns its exit code."""
  (folder / ".venv" / "bin").mkdir(parents=True)
  for name, text in {"sleep": "exec /bin/sleep 0.1", **commands}.items():
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)
  env["PATH"] = f"{folder}:{os.environ['PATH']}"
  bash = ["bash", "-c", script]
  return subprocess.run(bash, cwd=folder, env=env, timeout=90).returncode


@pytest.mark.parametrize("then", ["exit", ":"])  # A server may hang.
def test_servers_of_skypilot_end_after_the_trainers(then, tmp_path):
  port = waits.free_port()
  task = written(*TASK, "--target=skypilot")
  script = yaml.safe_load(task)["run"].replace("/8400", f"/{port}")
  told = f"trap 'touch told; {then}' TERM; echo $$ >>started"
  stubs = {"env": f"{told}; while :; do /bin/sleep 0.1; done"}
  stubs |= {"timeout": 'shift; exec /usr/bin/timeout 2 "$@"'}
  nodes = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\nb"}
  started = tmp_path / "started"

  def lines():
    return started.read_text().split() if started.exists() else []

  with futures.ThreadPoolExecutor() as pool:
    with socket.create_server(("127.0.0.1", port)):
      code = pool.submit(ended, script, tmp_path, stubs, **nodes)
      waits.wait_for(lambda: len(lines()) == 4, 60)
      os.kill(int(lines()[0]), signal.SIGKILL)
      waits.wait_for(lambda: len(lines()) == 5, 60)  # It was started again.
      assert not code.done()
    assert code.result() == 0
  assert (tmp_path / "told").exists()
  # A killed process remains until its parent has seen its end.
  waits.wait_for(lambda: not any(map(is_there, lines())), 60)


def is_there(pid):
  try:
    os.kill(int(pid), 0)
  except ProcessLookupError:
    return False
  return True


def test_a_sampler_of_slurm_that_hangs_ends_with_the_job(tmp_path):
  script = written(*TASK, "--target=slurm", f"--output={tmp_path}")
  trains = "[[ $* != *=trainer* ]] || { touch cluster/resumes-1; exit 75; }"
  stubs = {"srun": f"mkdir -p cluster; {trains}; exec /bin/sleep 100"}
  stubs |= {"squeue": "", "scancel": "", "sleep": "echo >>slept"}
  stubs["scontrol"] = 'if [ "$1" = show ]; then echo a; else touch queued; fi'
  env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "HOME": str(tmp_path)}
  assert ended(script, tmp_path, stubs, **env) == 75
  assert (tmp_path / "queued").exists()
  assert len((tmp_path / "slept").read_text()) < 20  # Of five seconds each.


def test_names_are_those_of_services():
  names = {"7B": "run-7b", f"{'a' * 39}_b": "a" * 39, "_": "run"}
  for name, expected in names.items():
    found = written(*TASK, "--target=jobset", f"--config.name={name}")
    assert f"\nmetadata:\n  name: {expected}\n" in found


def test_keys_that_a_configuration_names_are_secrets_too():
  args = *TASK, "--config.retrieval.key_variable=TOKEN"
  assert "\n  TOKEN: null\n" in written(*args, "--target=skypilot")
  assert '=TOKEN="$TOKEN" ' in written(*args, "--target=jobset")


def test_sglang_is_found_in_the_folder_of_the_project(monkeypatch, tmp_path):
  python = tmp_path / ".venv-sglang" / "bin" / "python"
  python.parent.mkdir(parents=True)
  python.touch()
  monkeypatch.setattr(shipped, "ROOT", tmp_path)
  monkeypatch.delenv("PYTHON", raising=False)
  part = node.server(
    config_lib.ExperimentConfig(), name="server", gpus="0", size=1, port="1"
  )
  assert part.env["PYTHON"] == str(python)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
@pytest.mark.parametrize("flags", [(), JAX_ALONE, ("--nodes=1",)])
def test_shellcheck_finds_nothing_in_the_script(tmp_path, flags):
  file = tmp_path / "job.sh"
  args = "--target=slurm", "--nodes=4", *flags, "--output=it's here/run"
  file.write_text(written(PAPER, TWO, *args))
  done = subprocess.run(["shellcheck", file], capture_output=True, text=True)
  assert done.stdout == ""


@pytest.mark.parametrize(
  ("args", "sentence"),
  [
    (
      ["--nodes=2", TWO],
      "16 devices, expected those of whole nodes of 8, 1 to 1",
    ),
    (["--nodes=4"], "4 devices, expected those of whole nodes of 8, 1 to 3"),
    (
      ["--nodes=2", ONE, "--config.servers.colocated=true"],
      "servers.colocated: found True with pipeline.async_level 1",
    ),
    (["--nodes=2", ONE, *JAX], "async_level: found 1 in 2 processes"),
  ],
)
def test_what_no_node_could_run_is_not_written(args, sentence):
  args = ["--target=slurm", "--output=run", *args]
  assert sentence in commands.run(node, PAPER, *args)
  assert "--nodes: found 2, expected --target" in commands.run(
    node, PAPER, "--nodes=2"
  )


@pytest.mark.slow
def test_slurm_queues_a_stopped_run_again_until_it_ends(tmp_path):
  if shutil.which("sinfo") is None or subprocess.run(["sinfo"]).returncode:
    pytest.skip("needs a running SLURM")
  output = tmp_path / "it's a run"
  small = ("curriculum.total_steps=80", "questions=4", "save_every=4")
  args = [f"--config.{each}" for each in small]
  args += ["--config.curriculum.phase1_steps=40", "--gpus=0", "--threads=1"]
  args += ["--config=configs/quickstart.py", "--target=slurm"]
  commands.printed(node, *args, f"--output={output}")
  env = {**os.environ, "ANYSEARCH_KEYS": str(tmp_path / "keys")}
  env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  (script,) = output.glob("cluster/*.sh")
  submit = ["sbatch", "--parsable", script]
  job = subprocess.check_output(submit, cwd=ROOT, env=env, text=True).strip()
  metrics = output / "metrics.jsonl"

  def rollouts():
    return metrics.read_text().count("\n") if metrics.exists() else 0

  waits.wait_for(lambda: rollouts() >= 3, 600)
  # As near the time limit: only the script gets the signal.
  subprocess.run(["scancel", "--batch", "--signal=TERM", job], check=True)
  log = output / "cluster" / f"slurm-{job}.log"
  waits.wait_for(lambda: "saved and stopped; queued" in log.read_text(), 200)
  waits.wait_for(lambda: (output / "policy" / "config.json").exists(), 900)
  assert rollouts() == 16
  assert "resumes from it" in log.read_text()
