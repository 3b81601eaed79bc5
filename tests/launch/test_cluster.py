"""What a cluster starts: the files, and the parts of each of its nodes.

A real SLURM runs the script where `sinfo` finds one; shellcheck reads it where
it is installed.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tempfile

import commands
import pytest
import yaml
from waits import wait_for

from anysearch_jax.launch import cluster, node, shipped
from anysearch_jax.launch import flags as launch_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAPER = "--config=configs/qwen2_5_7b.py"
ONE, TWO = "--config.mesh.fsdp=4", "--config.mesh.fsdp=8"  # Nodes that train.
JAX = "--config.engine.kind=jax", "--config.pipeline.async_level=1"
TASK = PAPER, ONE, "--nodes=2", "--output=run"
HOSTS = ("a", "b", "c", "d")
SERVERS = node.Servers()


def parts(rank, *, trainers=2, servers=SERVERS, hosts=HOSTS):
  config = launch_flags.load_config("configs/qwen2_5_7b.py")
  return node.parts_in_cluster(
    config,
    ["python", "-m", "anysearch_jax.launch.train"],
    cluster.Place(hosts, trainers, rank),
    servers=servers,
  )


def values(part, name):
  """Returns the values of a flag, in order."""
  prefix = f"--{name}="
  return [w.removeprefix(prefix) for w in part.command if w.startswith(prefix)]


def test_the_first_node_has_the_retriever_and_drives():
  (retriever,), trainer = parts(0)
  assert retriever.name == "retriever"
  # No other node asks the retriever.
  assert values(trainer, "config.retrieval.url") == ["http://127.0.0.1:8000"]
  assert not values(retriever, "host")
  urls = [f"http://{h}:{p}" for h in ("c", "d") for p in range(30000, 30004)]
  other_services, other = parts(1)
  assert other_services == []
  for part in (trainer, other):
    assert values(part, "config.sglang.urls") == [",".join(urls)]
    assert values(part, "config.engine.kind") == ["sglang"]


def test_nodes_that_train_are_one_run():
  for rank in (0, 1):
    _, trainer = parts(rank)
    assert values(trainer, "coordinator") == ["a:8401"]
    assert values(trainer, "processes") == ["2"]
    assert values(trainer, "process") == [str(rank)]
  services, trainer = parts(0, trainers=1)
  assert not values(trainer, "coordinator")
  assert parts(1)[0] == []


def test_the_other_nodes_serve_until_they_are_stopped():
  services, main = parts(3)
  assert main.command == ("sleep", "infinity")
  gpus = [part.env["CUDA_VISIBLE_DEVICES"] for part in services]
  assert gpus == ["0,1", "2,3", "4,5", "6,7"]
  assert "HOST=0.0.0.0" in services[0].command
  assert services[3].health == "http://127.0.0.1:30003/health"


def test_the_key_of_servers_is_in_a_private_file_while_they_run(
  monkeypatch, tmp_path
):
  monkeypatch.delenv("KEY_FILE", raising=False)
  monkeypatch.setenv("SGLANG_KEY", "secret")
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  args = "--hosts=a,b", "--rank=1", ONE
  assert "secret" not in written(PAPER, *args) and not [*tmp_path.iterdir()]
  with cluster.key_file():
    key = pathlib.Path(os.environ["KEY_FILE"])
    assert key.parent.parent == tmp_path and key.read_text() == "secret\n"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700
  assert not [*tmp_path.iterdir()] and "KEY_FILE" not in os.environ


def test_without_servers_every_node_trains_and_samples():
  services, trainer = parts(3, servers=None)
  assert [part.name for part in services] == ["retriever"]
  assert values(trainer, "processes") == ["4"]
  assert values(trainer, "process") == ["3"]
  assert not values(trainer, "role")


def written(*args):
  ended, said = commands.printed(node, *args, "--dry_run")
  assert ended == 0, ended
  return said


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
  args = "--target=jobset", "--nodes=5", "--trainers=2", "--image=me/anysearch"
  found = yaml.safe_load(written(PAPER, TWO, *args, "--output=/shared/run"))
  assert unlike(found, _JOBSET) == []
  trainer, sampler = found["spec"]["replicatedJobs"]
  counts = [j["template"]["spec"]["completions"] for j in (trainer, sampler)]
  assert counts == [2, 3]
  (pod,) = sampler["template"]["spec"]["template"]["spec"]["containers"]
  assert pod["image"] == "me/anysearch"
  assert pod["livenessProbe"]["httpGet"] == {"path": "/health", "port": 30000}
  *python, code = pod["lifecycle"]["preStop"]["exec"]["command"]
  health = "http://qwen2-5-7b-trainer-0-0.qwen2-5-7b:8400/health"
  assert python == ["python", "-c"] and f'"{health}"' in code
  compile(code, "preStop", "exec")
  assert pod["args"][0].endswith("--rank=$((2 + JOB_COMPLETION_INDEX))")
  hosts = "qwen2-5-7b-trainer-0-1.qwen2-5-7b,qwen2-5-7b-sampler-0-0.qwen2-5-7b"
  assert hosts in pod["args"][0] and "--trainers=2" in pod["args"][0]
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
  assert found["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
  keys = "WANDB_API_KEY", "CONTROLLER_KEY", "SGLANG_KEY"
  assert found["secrets"] == dict.fromkeys(keys)
  assert "-e '.[cuda12,wandb]'" in found["setup"]
  for script in (found["setup"], found["run"]):
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0


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


@pytest.mark.parametrize(("then", "n"), [("exit", 1), (":", 0)])  # May hang.
def test_a_sampler_of_skypilot_ends_with_the_controller(then, n, tmp_path):
  script = yaml.safe_load(written(*TASK, "--target=skypilot"))["run"]
  told = f"trap 'touch told; {then}' TERM; touch up"
  some = f"until [ -e up ]; do sleep 1; done; echo >>y; [ `wc -l <y` -le {n} ]"
  stubs = {".venv/bin/python": f"{told}; while :; do sleep 1; done"}
  stubs |= {"curl": some, "timeout": 'shift; exec /usr/bin/timeout 2 "$@"'}
  nodes = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "a\nb"}
  assert ended(script, tmp_path, stubs, **nodes) == 0
  assert (tmp_path / "told").exists()


def test_a_sampler_of_slurm_that_hangs_ends_with_the_job(tmp_path):
  script = written(*TASK, "--target=slurm", f"--output={tmp_path}")
  trains = "[[ $* != *=training* ]] || { touch cluster/resumes-1; exit 75; }"
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
  assert f"PYTHON={python}" in parts(3)[0][0].command


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
@pytest.mark.parametrize("nodes", [1, 4])
def test_shellcheck_finds_nothing_in_the_script(tmp_path, nodes):
  file = tmp_path / "job.sh"
  args = "--target=slurm", f"--nodes={nodes}", "--output=it's here/run"
  file.write_text(written(PAPER, TWO, *args))
  done = subprocess.run(["shellcheck", file], capture_output=True, text=True)
  assert done.stdout == ""


@pytest.mark.parametrize(
  ("args", "sentence"),
  [
    (["--nodes=2", "--trainers=2"], "--trainers: found 2, expected"),
    (["--hosts=a,b", "--rank=2"], "--rank: found 2, expected less than 2"),
    (["--nodes=4"], "4 devices, expected 16, those of 2 nodes that train"),
    (
      ["--nodes=2", ONE, "--config.sglang.colocated=true"],
      "sglang.colocated: found True with pipeline.async_level 1",
    ),
    (["--nodes=2", ONE, *JAX], "async_level: found 1 in 2 processes"),
  ],
)
def test_what_no_node_could_run_is_not_written(args, sentence):
  args = ["--target=slurm", "--output=run", *args]
  assert sentence in commands.run(node, PAPER, *args)
  assert "2, expected --target" in commands.run(node, PAPER, "--nodes=2")


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

  wait_for(lambda: rollouts() >= 3, 600)
  # As near the time limit: only the script gets the signal.
  subprocess.run(["scancel", "--batch", "--signal=TERM", job], check=True)
  log = output / "cluster" / f"slurm-{job}.log"
  wait_for(lambda: "saved and stopped; queued" in log.read_text(), 200)
  wait_for(lambda: (output / "policy" / "config.json").exists(), 900)
  assert rollouts() == 16
  assert "resumes from it" in log.read_text()
