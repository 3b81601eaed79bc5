"""The export command: from a training run to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import shutil

import commands
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
import study

from anysearch_jax import config as config_lib
from anysearch_jax.export import hf_export
from anysearch_jax.launch import export_hf as command
from anysearch_jax.policy import hf, tensor_files
from anysearch_jax.training import checkpoint

BASE = "base"
NAMED = "---\nlicense: other\nlicense_name: n\n---\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Trains two runs from one base folder: all weights, and adapters."""
  root = tmp_path_factory.mktemp("runs")
  parts = small_run.parts()
  hf.save(root / BASE, parts["policy"])
  (root / BASE / "LICENSE").write_text("do as you like")
  parts["policy"] = hf.load(root / BASE)
  config = dataclasses.replace(small_run.CONFIG, policy=str(root / BASE))
  small_run.train(root / "full", parts, config)
  adapted = config_lib.changed(config, lora={"rank": 2})
  small_run.train(root / "adapted", parts, adapted)
  return root


def weights_of(folder) -> dict[str, np.ndarray]:
  return {
    name: np.asarray(tensor_files._read(t, tuple(slice(0, n) for n in t.shape)))
    for name, t in tensor_files.headers(folder).items()
  }


def masters(run, rollout) -> dict:
  """Returns the checkpoint's parameters as they were saved."""
  policy = hf.load(run / "policy")
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    policy.params,
  )
  return checkpoint.read(run / "checkpoints", rollout, "params", like)


@pytest.mark.parametrize(
  ("dtype", "rollout"), [("float32", 4), ("bfloat16", 2), ("float16", 4)]
)
def test_the_export_is_the_masters_rounded_once(runs, tmp_path, dtype, rollout):
  out = tmp_path / "out"
  written = hf_export.write(
    runs / "full", out, rollout=rollout, dtype=dtype, shard_bytes=5000
  )
  assert written == rollout
  assert json.loads((out / "config.json").read_text())["dtype"] == dtype
  assert len(list(out.glob("*.safetensors"))) > 1
  jax.tree.map(
    lambda found, master: np.testing.assert_array_equal(
      found, np.asarray(master).astype(jnp.dtype(dtype)).astype(np.float32)
    ),
    hf.load(out).params,
    masters(runs / "full", rollout),
  )
  assert (out / "LICENSE").read_text() == "do as you like"
  for name in ("tokenizer.json", "chat_template.jinja"):
    assert (out / name).read_bytes() == (runs / BASE / name).read_bytes()


def test_adapters_are_merged_and_also_written_separately(runs, tmp_path):
  out, adapter = tmp_path / "out", tmp_path / "adapter"
  hf_export.write(runs / "adapted", out, dtype="float32", adapter=adapter)
  ours, of_run = weights_of(out), weights_of(runs / "adapted" / "policy")
  assert ours.keys() == of_run.keys()
  for name, value in of_run.items():
    # The summation order differs on more devices.
    np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-8)
  of_run = runs / "adapted" / "adapter" / "adapter_model.safetensors"
  assert (adapter / of_run.name).read_bytes() == of_run.read_bytes()
  config = json.loads((adapter / "adapter_config.json").read_text())
  assert config["base_model_name_or_path"] == str(runs / BASE)


def test_moved_base_folder_can_be_given(runs, tmp_path):
  shutil.move(runs / BASE, runs / "moved")
  try:
    with pytest.raises(ValueError, match=f"{BASE}: no such folder; .*--base"):
      hf_export.write(runs / "adapted", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    hf_export.write(runs / "adapted", tmp_path / "out", base=runs / "moved")
    # The base is not needed if all weights were trained.
    hf_export.write(runs / "full", tmp_path / "full")
  finally:
    shutil.move(runs / "moved", runs / BASE)


def test_base_with_other_weights_is_rejected(runs, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(runs / "adapted", run)
  noted = {"policy": {"sha256": tensor_files.digest(runs / BASE)}}
  (run / "provenance.json").write_text(json.dumps(noted))
  hf_export.write(run, tmp_path / "out")
  # The shapes agree, so without the check adapters would be added twice.
  with pytest.raises(ValueError, match="not those that .* began with"):
    hf_export.write(run, tmp_path / "again", base=run / "policy")
  assert not (tmp_path / "again").exists()


def test_damaged_checkpoint_is_skipped(runs, tmp_path, caplog):
  run = tmp_path / "run"
  shutil.copytree(runs / "full", run)
  victim = next((run / "checkpoints" / "4" / "params" / "d").iterdir())
  victim.write_bytes(victim.read_bytes()[:-1])
  before = sorted(run.rglob("*"))
  assert hf_export.write(run, tmp_path / "out") == 2
  assert str(victim) in caplog.text
  assert sorted(run.rglob("*")) == before
  with pytest.raises(checkpoint.DamagedError, match="checkpoint is damaged"):
    hf_export.write(run, tmp_path / "again", rollout=4)
  with pytest.raises(FileNotFoundError, match=r"found checkpoints \[2, 4\]"):
    hf_export.write(run, tmp_path / "again", rollout=3)
  assert not (tmp_path / "again").exists()


def test_only_earlier_exports_are_replaced(runs, tmp_path):
  root = tmp_path / "root"
  shutil.copytree(runs, root)
  (root / "mine").mkdir()
  (root / "mine" / "README.md").write_text("kept")
  before = sorted(root.rglob("*"))
  run = root / "adapted"
  kept = [root, root / "mine", run, run / "checkpoints", run / "policy"]
  for folder in [*kept, run / "adapter", root / BASE]:
    for names in ({"output": folder}, {"adapter": folder}):
      folders = {"output": root / "new", "base": root / BASE} | names
      with pytest.raises(ValueError, match="is not replaced|neither inside"):
        hf_export.write(run, **folders, overwrite=True)
  for names in (("x", "x"), ("x", "x/y"), ("x/y", "x")):
    output, adapter = (root / name for name in names)
    with pytest.raises(ValueError, match="neither inside the other"):
      hf_export.write(run, output, adapter=adapter)
  assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
  ("run", "adapter", "message"),
  [
    ("nowhere", "", "no source/; expected the folder of a training run"),
    ("full", "adapter", "adapters.*--adapter"),
  ],
)
def test_invalid_exports_are_rejected(runs, tmp_path, run, adapter, message):
  with pytest.raises(ValueError, match=message):
    hf_export.write(
      runs / run, tmp_path / "out", adapter=adapter and tmp_path / adapter
    )
  assert not list(tmp_path.iterdir())


def save_evaluation(folder, policy):
  study.save_row(study.row("x", questions=20, budgets=(0, 2)), folder)
  played = {"policy": {"sha256": tensor_files.digest(policy)}}
  (folder / "provenance.json").write_text(json.dumps(played))


def test_card_has_the_run_and_its_own_evaluations(runs, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(runs / "full", run)
  save_evaluation(run / "evaluation" / "plain", run / "policy")
  save_evaluation(run / "evaluation" / "start", runs / BASE)
  study.save_row(
    study.row("x", questions=20, budgets=(0, 2)), run / "evaluation" / "unknown"
  )
  (run / "provenance.json").write_text(
    json.dumps({"retriever": {"kind": "bm25", "sha256": "abc"}})
  )
  hf_export.write(run, tmp_path / "out")
  card = (tmp_path / "out" / "README.md").read_text()
  assert "| rollouts | 4 of 4 |" in card
  assert f"| base model | {BASE} |" in card
  assert "| corpus and retriever | kind bm25, sha256 abc |" in card
  assert "| questions | not recorded |" in card
  assert "**plain**" in card
  assert "**start**" not in card and "**unknown**" not in card
  assert "Measured with the weights in float32." in card
  prompts = json.loads((run / "prompts.json").read_text())
  assert prompts["plain"] in card
  hf_export.write(run, tmp_path / "early", rollout=2)
  card = (tmp_path / "early" / "README.md").read_text()
  assert "| rollouts | 2 of 4 |" in card
  assert "was not evaluated" in card


def test_the_card_names_the_base_and_its_licence(runs, tmp_path, caplog):
  (runs / BASE / "README.md").write_text("---\nlicense: apache-2.0\n---\n# B")
  try:
    hf_export.write(
      runs / "full", tmp_path / "out", base_model="Qwen/Qwen2.5-7B"
    )
  finally:
    (runs / BASE / "README.md").unlink()
  assert not caplog.messages
  found = huggingface_hub.metadata_load(tmp_path / "out" / "README.md")
  assert found["base_model"] == "Qwen/Qwen2.5-7B"
  assert found["license"] == "apache-2.0"
  # Without a card, the licence file is used.
  hf_export.write(runs / "full", tmp_path / "local")
  found = huggingface_hub.metadata_load(tmp_path / "local" / "README.md")
  assert "base_model" not in found
  assert (found["license"], found["license_link"]) == ("other", "LICENSE")
  assert (tmp_path / "local" / "LICENSE").is_file()
  assert "give it with --base_model=owner/name" in caplog.text
  with pytest.raises(ValueError, match="'local': expected owner/name"):
    hf_export.write(runs / "full", tmp_path / "new", base_model="local")
  assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
  ("folder", "name"),
  [
    ("cache/models--Qwen--Qwen2.5-7B/snapshots/1a2b", "Qwen/Qwen2.5-7B"),
    ("models/Qwen2.5-7B", "Qwen2.5-7B"),
    ("models--one/snapshots/1a2b", "1a2b"),
  ],
)
def test_base_name_is_read_from_the_hubs_cache(folder, name):
  assert hf_export.hub_name(folder) == name


@pytest.mark.parametrize(
  ("files", "licence"),
  [
    ({}, {}),
    (
      {"README.md": NAMED, "LICENSE": ""},
      {"license": "other", "license_name": "n"},
    ),
    (
      {"README.md": "---\n: [\n---\n", "LICENSE.txt": ""},
      {"license": "other", "license_link": "LICENSE.txt"},
    ),
    ({"README.md": "---\nlicense: [mit, gpl]\n---\n"}, {}),
    ({"README.md": "no header"}, {}),
  ],
)
def test_the_licence_is_the_cards_or_the_file(tmp_path, files, licence):
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  assert hf_export.licence(tmp_path / "gone", tmp_path) == licence


def test_the_command_takes_the_checkpoints_folder(runs, tmp_path):
  out = tmp_path / "out"
  (home := tmp_path / "me@here").symlink_to(runs / "full")

  def export(*more, at=""):
    named = f"--checkpoint={home}/checkpoints{at}"
    said = commands.run(command, "--cache=", named, f"--output={out}", *more)
    lines = (out / "README.md").read_text().splitlines()
    return said, [line for line in lines if line.startswith("| rollouts |")]

  assert export(at="@2") == ("", ["| rollouts | 2 of 4 |"])
  said, rollouts = export()
  assert "out exists; name another folder" in said
  assert rollouts == ["| rollouts | 2 of 4 |"]
  assert export("--overwrite") == ("", ["| rollouts | 4 of 4 |"])
