"""The script that starts vLLM servers."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.rollout.servers import vllm

_SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "serve_vllm.sh"
# Replaces the Python of vLLM; prints its variables and arguments.
_ECHO = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([dict(os.environ), sys.argv[1:]]))
"""


@pytest.fixture
def serve(tmp_path):
  """Runs the script; returns variables, arguments, and what it says."""
  python = tmp_path / "python"
  python.write_text(_ECHO)
  python.chmod(0o755)

  def run(*flags, **settings):
    done = subprocess.run(
      [_SCRIPT, "policy", "30000", *flags],
      env={"PATH": os.environ["PATH"], "PYTHON": str(python)} | settings,
      capture_output=True,
      text=True,
      timeout=60,
      check=True,
    )
    variables, arguments = json.loads(done.stdout)
    return variables, arguments, done.stderr

  return run


def test_a_server_has_what_a_run_needs(serve):
  variables, found, said = serve("--dtype", "float32", TP="2", CONTEXT="512")
  assert variables["VLLM_SERVER_DEV_MODE"] == "1"
  assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
  assert found == [
    *("-m", "vllm.entrypoints.cli.main", "serve", "policy"),
    *("--host", "127.0.0.1", "--port", "30000"),
    *("--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.6"),
    *("--max-model-len", "512", "--dtype", "bfloat16", "--enable-scale-out"),
    *("--logprobs-mode", "processed_logprobs"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    *("--dtype", "float32"),
  ]
  assert not said


@pytest.mark.parametrize(
  ("host", "warns"),
  [("127.1.2.3", False), ("localhost", False), ("0.0.0.0", True)],
)
def test_a_host_that_others_may_reach_is_warned_of(serve, host, warns):
  _, found, said = serve(HOST=host)
  assert found[found.index("--host") + 1] == host
  assert (f"whoever reaches {host}:30000 controls" in said) == warns


@pytest.mark.parametrize("rank", [1, 8, 9, 33, 512])
def test_a_server_of_adapters_is_started_as_one_of_launch_node(serve, rank):
  _, found, _ = serve(LORA=str(rank))
  targets = config_lib.LoraConfig().targets
  expected = vllm.adapter_flags(rank, targets)
  assert found[-len(expected) :] == expected
