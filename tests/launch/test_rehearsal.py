"""The rehearsal of the paper's run, for each family of policies."""

from __future__ import annotations

import csv
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax.host import json_files
from anysearch_jax.policy import decoder, hf
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.world import rehearsal_policy
from configs import rehearsal

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(
  os.environ.get("ANYSEARCH_DATA", ROOT / ".." / "shared" / "data")
)
TOKENIZERS = {"qwen2_5": "qwen2.5", "qwen3": "qwen3", "llama3_1": "llama3.1"}


# Hides torch, as if it was not installed. `sys.modules["torch"] = None` would
# break SciPy, which takes every module that is there for one with attributes.
WITHOUT_TORCH = """
import sys
from importlib import machinery

class Finder(machinery.PathFinder):
  @classmethod
  def find_spec(cls, name, path=None, target=None):
    return None if name == "torch" else super().find_spec(name, path, target)

sys.meta_path = [
  Finder if found is machinery.PathFinder else found for found in sys.meta_path
]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "has_torch"),
  [("qwen2_5", True), ("qwen3", True), ("llama3_1", False)],
)
def test_rehearsal_of_the_papers_run_succeeds(
  tokenizers_folder, tmp_path, family, has_torch
):
  assert family in rehearsal.FAMILIES
  environment = dict(os.environ)
  if has_torch:
    pytest.importorskip("torch", reason="transformers reads the export by it")
  else:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    environment["PYTHONPATH"] = str(tmp_path)
  if not DATA.is_dir():
    pytest.skip("no real questions: ANYSEARCH_DATA names no folder of them")
  root = tmp_path / "rehearsal"
  command = [
    *("-m", "launch.rehearsal", f"--family={family}"),
    f"--tokenizer={tokenizers_folder / TOKENIZERS[family]}",
    f"--questions={DATA / 'questions'}",
    f"--corpus={DATA / 'corpus.jsonl.gz'}",
    f"--output={root}",
  ]
  done = subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  run = root / "run"
  # Two rollouts, each once although training was killed; both phases.
  rollouts = [json.loads(x) for x in (run / "metrics.jsonl").open()]
  assert [x["rollout"] for x in rollouts] == [0, 1]
  assert [x["phase"] for x in rollouts] == [1, 2]
  logs = sorted(path.name for path in (root / "logs").iterdir())
  assert sum("launch.train" in name for name in logs) == 2
  assert any("transformers" in name for name in logs) == has_torch
  assert ("torch is not installed" in done.stdout) != has_torch
  # Real searches were answered over HTTP.
  episodes = [
    json.loads(line)
    for line in (run / "evaluation" / "plain" / "episodes.jsonl").open()
  ]
  assert len(episodes) == 2 * 2 * 4
  assert {e["dataset"] for e in episodes} == {"nq", "musique"}
  assert any("Doc 1(Title: " in str(e["spans"]) for e in episodes)
  assert not any(e["failed"] for e in episodes)
  # What was exported is what was trained.
  trained = (run / "policy" / "model.safetensors").read_bytes()
  assert (root / "export" / "model.safetensors").read_bytes() == trained
  assert (root / "report.html").stat().st_size > 10_000
  assert list(csv.reader(next(root.glob("*.csv")).open()))


@functools.partial(jax.jit, static_argnums=1)
def _logits(params, a, tokens):
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = decoder.forward(params, a, tokens, positions, jnp.ones_like(tokens))
  return decoder.logits(params, hidden)


def test_rehearsal_policy_searches_and_answers(tokenizers_folder, tmp_path):
  folder = tokenizers_folder / "qwen3"
  shape = json_files.read(ROOT / rehearsal.FAMILIES["qwen3"][1])
  rehearsal_policy.make(shape, folder, tmp_path / "policy")
  policy = hf.load(tmp_path / "policy")
  codec = tokenizer_lib.Tokenizer.from_folder(folder)
  tokens = codec.render("Who?")[1]
  rng = np.random.default_rng(0)
  length = len(tokens) + 6
  for _ in range(6):
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = _logits(policy.params, policy.architecture, padded)
    logits = np.asarray(logits)[0, len(tokens) - 1]
    chances = np.exp(logits - logits.max())
    tokens.append(int(rng.choice(len(logits), p=chances / chances.sum())))
  text = codec.decode(tokens[-6:])
  assert text.startswith(("<search>", "<answer>")), text
