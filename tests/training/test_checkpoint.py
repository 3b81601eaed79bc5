"""Tests checkpoints: restored values, which are kept, and damage to them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_checkpoint as small

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.training import checkpoint

pristine, folder = small.pristine, small.folder


def test_saved_values_are_restored(folder, tmp_path):
  assert small.restore(tmp_path / "new") is None
  assert small.bits(small.restore(folder)) == small.bits(small.saved(4))
  written = checkpoint.read_json(folder, 4, "config")
  assert (
    settings.from_dict(config_lib.ExperimentConfig, written) == small.CONFIG
  )


def test_parameters_are_read_without_the_optimizer(folder):
  shutil.rmtree(folder / "4" / "optimizer")
  saved = small.saved(4)
  params = checkpoint.read(
    folder, 4, "params", small.abstract(saved.state.params)
  )
  state = saved.state._replace(params=params)
  assert small.bits(saved._replace(state=state)) == small.bits(saved)


@pytest.mark.parametrize(
  ("last", "best", "qualities", "expected"),
  [
    (2, 0, {2: 0.3, 4: 0.2, 6: 0.1}, [4, 6]),
    (2, 2, {2: 0.5, 4: 0.9, 6: 0.1, 8: 0.2, 10: 0.3}, [2, 4, 8, 10]),
    # Of equal qualities the later one, also if both are the worst possible.
    (1, 1, {2: 0.5, 4: 0.5, 6: 0.1}, [4, 6]),
    (1, 1, {2: 0.5, 4: -math.inf, 6: 0.1}, [2, 6]),
  ],
)
def test_the_last_and_the_best_are_kept(
  tmp_path, last, best, qualities, expected
):
  keep = {"keep_last": last, "keep_best": best}
  checkpoints = small.opened(tmp_path, **keep)
  for rollout, quality in qualities.items():
    # Checkpoints from before a restart count like those after it.
    if rollout == 6:
      checkpoints.__exit__()
      checkpoints = small.opened(tmp_path, **keep)
    checkpoints.save(small.saved(rollout), quality)
  checkpoints.__exit__()
  assert checkpoint.rollouts(tmp_path) == expected
  for rollout in expected:
    assert checkpoint.find_damage(tmp_path / str(rollout)) == ""


def test_quality_is_a_metric_of_the_rollout():
  config = config_lib.CheckpointConfig(best_metric="reward/total", keep_best=1)
  for value, expected in ((2, 2.0), (math.nan, -math.inf)):
    metrics = {"reward/em": 0.5, "reward/total": value}
    assert checkpoint.quality(metrics, config=config) == expected
  assert checkpoint.quality({"step": 3}, config=config) == -math.inf
  assert checkpoint.quality({}, config=config_lib.CheckpointConfig()) == 0.0


def test_a_save_writes_the_values_at_the_call(tmp_path, monkeypatch):
  write, overwritten = checkpoint.write_manifest, threading.Event()

  def slow(folder):
    assert overwritten.wait(60)
    return write(folder)

  monkeypatch.setattr(checkpoint, "write_manifest", slow)
  # Large enough that it is still being written when it is overwritten.
  big = {"w": jax.random.normal(jax.random.key(0), (4 << 20,))}
  expected = np.asarray(big["w"]).copy()
  overwrite = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
  saved = small.saved(2)
  saved = saved._replace(state=saved.state._replace(params=big))
  with small.opened(tmp_path) as checkpoints:
    checkpoints.save(saved, small.QUALITY)
    saved.progress["counters"]["run"]["failed"] = -1
    big["w"] = overwrite(big["w"]).block_until_ready()
    assert checkpoint.rollouts(tmp_path) == []
    overwritten.set()
    checkpoints.save(small.saved(4), small.QUALITY)
  params = checkpoint.read(tmp_path, 2, "params", small.abstract(big))
  np.testing.assert_array_equal(params["w"], expected)
  progress = checkpoint.read_json(tmp_path, 2, "progress")
  assert progress["counters"]["run"]["failed"] == 2
  assert small.bits(small.restore(tmp_path)) == small.bits(small.saved(4))
  assert checkpoint.find_damage(tmp_path / "2") == ""


def _on_mesh(*shape: int):
  """Shards matrices over both axes of a mesh, vectors over the second."""
  devices = np.asarray(jax.devices()[-math.prod(shape) :]).reshape(shape)
  mesh = jax.sharding.Mesh(devices, ("fsdp", "tensor"))

  def sharding(x) -> jax.sharding.Sharding:
    divides = not any(size % 8 for size in x.shape)
    axes = ("fsdp", "tensor")[-x.ndim :] if x.ndim and divides else ()
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

  return sharding


@pytest.mark.parametrize("shape", [(2, 4), (1, 1)])
def test_another_mesh_restores_the_same_bits(tmp_path, shape):
  saved, before, after = small.saved(2), _on_mesh(4, 2), _on_mesh(*shape)
  placed = jax.device_put(saved.state, jax.tree.map(before, saved.state))
  assert len(placed.params["layers"]["q"].addressable_shards[0].data) == 2
  with small.opened(tmp_path) as checkpoints:
    checkpoints.save(saved._replace(state=placed), small.QUALITY)
  like = saved._replace(
    state=small.abstract(saved.state, after),
    curriculum=small.abstract(saved.curriculum, after),
  )
  with small.opened(tmp_path) as checkpoints:
    restored = checkpoints.restore(2, like)
  assert small.bits(restored) == small.bits(saved)
  ours, asked = jax.tree.leaves(restored[1:3]), jax.tree.leaves(like[1:3])
  assert [x.sharding for x in ours] == [x.sharding for x in asked]


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"layers": {"q": jnp.zeros((8, 9))}}, "8, 16], expected float32[8, 9];"),
    ({"norm": jnp.zeros(16)}, "norm: found bfloat16[16], expected float32[16]"),
    ({"head": jnp.zeros(2)}, "head: found no array, expected float32[2]"),
    ({"norm": None}, "norm: found bfloat16[16], expected no array"),
  ],
)
def test_a_checkpoint_of_another_policy_is_refused(folder, change, sentence):
  like = small.saved(0)
  params = like.state.params | change
  like = like._replace(state=like.state._replace(params=params))
  with small.opened(folder) as checkpoints:
    with pytest.raises(ValueError, match=re.escape(sentence)):
      checkpoints.restore(4, like)


def test_a_checkpoint_is_due_after_the_configured_minutes():
  times = iter([0, 100, 1799, 1800, 1900, 3599, 3700])
  pace = checkpoint.Pace(30, lambda: next(times))
  assert [pace.rollout() for _ in range(3)] == [False, False, True]
  pace.saved()  # At 1900.
  assert [pace.rollout() for _ in range(2)] == [False, True]
  assert pace.longest == 3599 - 1800
  never = iter([0, 1e9])
  assert not checkpoint.Pace(0, lambda: next(never)).rollout()


def test_a_stop_may_take_twice_a_rollout_and_twice_the_last_save(tmp_path):
  def seconds(size, longest=0, stepped=True):
    return checkpoint.stop_seconds(
      tmp_path, size, longest_rollout=longest, stepped=stepped
    )

  # Before the first save no speed is known, and a slow disk is assumed.
  unknown = seconds(91e9)
  assert seconds(1, 900) - seconds(1, 600) == 600
  assert seconds(1, 1) == seconds(1) > 60
  # A first compilation takes minutes, and a stop loses little before its end.
  assert seconds(1, stepped=False) <= 30
  for text in ("", "[1]", '{"bytes": "x"}', "{}"):
    (tmp_path / "last_save.json").write_text(text)
    assert seconds(91e9) == unknown
  for broken in ('{"bytes": 0, "seconds": 0}', '{"bytes": 0, "seconds": 5}'):
    (tmp_path / "last_save.json").write_text(broken)
    assert math.isfinite(seconds(91e9))
  last = {"bytes": 91_000_000_000, "seconds": 310}
  (tmp_path / "last_save.json").write_text(json.dumps(last))
  assert seconds(91e9) - seconds(0) == pytest.approx(2 * 310)
  assert unknown > seconds(91e9)


def test_a_save_is_measured(tmp_path):
  ticks = itertools.count(0, 60)
  with checkpoint.Checkpoints(
    tmp_path, config={}, keep=small.CONFIG.checkpoint, clock=lambda: next(ticks)
  ) as checkpoints:
    checkpoints.save(small.saved(2), small.QUALITY)
  written = sum(
    path.stat().st_size
    for path in (tmp_path / "2").rglob("*")
    if path.is_file()
    and str(path.relative_to(tmp_path / "2"))
    not in (*checkpoint.LATE, "manifest.json")
  )
  assert json.loads((tmp_path / "last_save.json").read_text()) == {
    "bytes": written,
    "seconds": 60,
  }


# Damage: all of it is found, and handled.


def _flip(path: pathlib.Path) -> None:
  """Flips one bit in the middle of a file."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def _truncate(path: pathlib.Path) -> None:
  os.truncate(path, path.stat().st_size // 2)


def _largest(folder: pathlib.Path) -> pathlib.Path:
  files = (path for path in folder.rglob("*") if path.is_file())
  return max(files, key=lambda path: path.stat().st_size)


def _files(folder: pathlib.Path) -> dict[str, tuple[bytes, int]]:
  return {
    str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
    for path in folder.rglob("*")
    if path.is_file()
  }


def test_a_manifest_lists_size_and_digest_of_every_file(tmp_path):
  (tmp_path / "a").write_bytes(b"12345")
  (tmp_path / "b").mkdir()
  (tmp_path / "b" / "c").write_bytes(b"")
  (tmp_path / checkpoint.LATE[0]).touch()
  checkpoint.write_manifest(tmp_path)
  assert json.loads((tmp_path / "manifest.json").read_text()) == {
    # As `sha256sum` prints them.
    "a": {
      "bytes": 5,
      "sha256": "5994471abb01112afcc18159f6cc74b4"
      "f511b99806da59b3caf5a9c173cacfc5",
    },
    "b/c": {
      "bytes": 0,
      "sha256": "e3b0c44298fc1c149afbf4c8996fb924"
      "27ae41e4649b934ca495991b7852b855",
    },
  }
  assert checkpoint.find_damage(tmp_path) == ""
  (tmp_path / "b" / "d").touch()
  assert "has b/d, which" in checkpoint.find_damage(tmp_path)
  (tmp_path / "b" / "d").unlink()
  path = tmp_path / "manifest.json"
  content = path.read_bytes()
  for i in range(len(content.rstrip())):
    path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
    assert checkpoint.find_damage(tmp_path)


def test_an_unreadable_file_is_damage(folder, monkeypatch):
  def bad_sector(*_):
    raise OSError(5, "Input/output error")

  monkeypatch.setattr(hashlib, "file_digest", bad_sector)
  assert "Input/output error" in checkpoint.find_damage(folder / "4")


def test_a_flipped_bit_is_found_in_every_file(folder):
  files = sorted(p for p in (folder / "4").rglob("*") if p.is_file())
  kinds = {path.relative_to(folder / "4").parts[0] for path in files}
  items = {"params", "optimizer", "curriculum", "progress", "config", "metrics"}
  assert kinds == items | {"manifest.json", *checkpoint.LATE}
  for path in files:
    content = path.read_bytes()
    _flip(path)
    damage = checkpoint.find_damage(folder / "4")
    if str(path.relative_to(folder / "4")) in checkpoint.LATE:
      # No restore reads them.
      assert not damage
      assert small.bits(small.restore(folder)) == small.bits(small.saved(4))
    elif path.name == "manifest.json":
      assert damage
    else:
      assert f"{path} is " in damage
    path.write_bytes(content)
  assert checkpoint.find_damage(folder / "4") == ""


@pytest.mark.parametrize(
  ("damage", "sentence"),
  [
    (lambda f: _flip(_largest(f / "params")), r"params/\S+ is {'bytes'"),
    (lambda f: _truncate(_largest(f / "optimizer")), r"optimizer/\S+ is {"),
    (lambda f: shutil.rmtree(f / "optimizer"), "lacks optimizer/"),
    # Orbax reads the metrics of every checkpoint when it opens a folder.
    (lambda f: (f / "metrics/metrics").write_text("{"), "metrics/metrics is"),
    (lambda f: _truncate(f / "manifest.json"), "cannot be read"),
    (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
  ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
  folder, caplog, damage, sentence
):
  (folder / "damaged" / "1").mkdir(parents=True)  # One of an earlier start.
  damage(folder / "4")
  broken = _files(folder / "4")
  with small.opened(folder) as checkpoints:
    assert small.bits(checkpoints.restore(2, small.saved(0))) == small.bits(
      small.saved(2)
    )
    [record] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "damaged checkpoint" in record.getMessage()
    assert re.search(sentence, record.getMessage())
    # It was moved aside unchanged, and the run can save its rollout again.
    assert os.listdir(folder / "damaged") == ["4"]
    assert _files(folder / "damaged" / "4") == broken
    checkpoints.save(small.saved(4), small.QUALITY)
  assert small.bits(small.restore(folder)) == small.bits(small.saved(4))


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(folder):
  for rollout in ("2", "4"):
    _flip(_largest(folder / rollout / "params"))
  before = _files(folder)
  with pytest.raises(checkpoint.DamagedError, match="damaged: .*/2/.*/4/"):
    small.opened(folder)
  assert _files(folder) == before


def _die_while_saving(folder: str) -> None:
  """Saves 2, and is killed when 4 is written but not complete."""
  small.write(folder, 2)
  with small.opened(folder) as checkpoints:
    checkpoint.write_manifest = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(small.saved(4), small.QUALITY)


def test_a_run_killed_while_it_saves_resumes_from_the_one_before(tmp_path):
  here, tests, root = pathlib.Path(__file__).parents[:3]
  path = here, tests / "support", root
  folder = tmp_path / "checkpoints"
  process = subprocess.run(
    [
      sys.executable,
      "-c",
      "import sys, test_checkpoint as tests; "
      "tests._die_while_saving(sys.argv[1])",
      str(folder),
    ],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
  )
  assert process.returncode == -signal.SIGKILL
  assert sorted(os.listdir(folder)) == [
    "2",
    "4.orbax-checkpoint-tmp",
    "last_save.json",
  ]
  assert small.bits(small.restore(folder)) == small.bits(small.saved(2))
  assert checkpoint.rollouts(folder) == [2]
  assert not list(folder.glob("*tmp*"))
  small.write(folder, 4)
  assert small.bits(small.restore(folder)) == small.bits(small.saved(4))


def test_reading_does_not_change_the_folder(folder, caplog):
  _truncate(_largest(folder / "4" / "params"))
  (folder / "6.orbax-checkpoint-tmp").mkdir()
  before = _files(folder)
  assert checkpoint.sound(folder) == 2
  assert "4/params" in caplog.text
  like = small.abstract(small.saved(0).state.params)
  checkpoint.read(folder, 2, "params", like)
  checkpoint.read_json(folder, 2, "progress")
  with pytest.raises(checkpoint.DamagedError, match="4/params"):
    checkpoint.sound(folder, 4)
  with pytest.raises(FileNotFoundError, match=r"\[2, 4\], expected 7"):
    checkpoint.sound(folder, 7)
  assert _files(folder) == before
  assert (folder / "6.orbax-checkpoint-tmp").is_dir()
  _flip(_largest(folder / "2" / "params"))
  with pytest.raises(checkpoint.DamagedError, match="4/params.* .*/2/"):
    checkpoint.sound(folder)
