"""Tests manifests and damaged checkpoints: all damage is found, and handled."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
import small_checkpoint as small

from anysearch_jax.training import checkpoint

pristine, folder = small.pristine, small.folder


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
      "import sys, test_checkpoint_damage as tests; "
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
