"""Rehearses bench.first_gpu on the CPU, with few packages."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from bench.first_gpu import notes as notes_lib
from bench.first_gpu import running

ROOT = pathlib.Path(__file__).resolve().parents[2]
_OWN = ("anysearch_jax", "bench")
# With requirements of JAX and of transformers.
_PACKAGES = (
  *("absl", "chex", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax"),
  *("orbax", "packaging", "safetensors", "tokenizers", "transformers"),
  # huggingface_hub requires them, and transformers requires it.
  *("filelock", "httpx2"),
)
# Refuses other packages to files of this project.
_SITE = f"""
import builtins, sys

allowed = {{*sys.stdlib_module_names, *{_OWN + _PACKAGES!r}}}
before = builtins.__import__

def checked(name, globals=None, locals=None, fromlist=(), level=0):
  file = (globals or {{}}).get("__file__") or ""
  top = name.partition(".")[0]
  ours = file.startswith({str(ROOT)!r}) and "site-packages" not in file
  if ours and not level and top not in allowed:
    raise ModuleNotFoundError(f"{{file}} imports {{top}}", name=top)
  return before(name, globals, locals, fromlist, level)

builtins.__import__ = checked
"""


def _rehearse(folder, *arguments):
  site = folder / "site"
  site.mkdir()
  (site / "sitecustomize.py").write_text(_SITE)
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  done = subprocess.run(
    [
      sys.executable,
      *("-m", "bench.first_gpu", "--rehearse"),
      *(f"--output={folder / 'out'}", *arguments),
    ],
    cwd=ROOT,
    env={**env, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=1200,
    check=False,
  )
  logs = "\n".join(
    f"{path.name}: {path.read_text()[-1500:]}"
    for path in sorted((folder / "out/logs").glob("*.log"))
  )
  assert done.returncode == 0, done.stdout + done.stderr + logs
  found = json.loads((folder / "out/rehearsal.json").read_text())
  stages = {stage["name"]: stage for stage in found["stages"]}
  for name, stage in stages.items():
    assert stage["status"] == "done", stage
    assert stage["seconds"] > 0
    assert not list(_values(stage["figures"], "failed")), name
  return {name: stage["figures"] for name, stage in stages.items()}


def _values(figures, wanted):
  """Yields the figures of a name, those of cases too."""
  for name, value in figures.items():
    if isinstance(value, dict):
      yield from _values(value, wanted)
    elif name == wanted:
      yield value


@pytest.mark.slow
def test_the_whole_rehearsal_needs_few_packages_and_writes_figures(tmp_path):
  found = _rehearse(tmp_path)
  # Without an address, there is no server to measure.
  assert list(found) == [name for name in running.STAGES if name != "server"]
  assert found["doctor"]["backend"] == "cpu"
  assert found["doctor"]["TFLOP/s"] > 0
  for name in ("decode", "step"):
    # No CPU has a data sheet: the floor is of what `doctor` measured.
    shares = [*_values(found[name], notes_lib.SHARE)]
    assert len(shares) == 2 and all(share > 0 for share in shares)
  assert [*_values(found["published"], "prime-rl on h100, s")][-1] == 31.492
  assert all(x > 0 for x in _values(found["published"], "step, s"))
  assert found["loop"]["rollout 0"]["handed over, s"] > 0
  assert found["vectors"]["8 queries, ms"] > 0
