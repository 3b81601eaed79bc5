"""Tests of deltas of weights: bytes, damage, and hosts that follow a run."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tracemalloc
import zipfile

import fake_sglang
import jax
import jax.numpy as jnp
import numpy as np
import policy_scores
import pytest
import sglang_engines as engines
from waits import wait_for

from anysearch_jax import config as config_lib
from anysearch_jax.host import disk
from anysearch_jax.launch import train
from anysearch_jax.policy import hf
from anysearch_jax.rollout.servers import delta
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import weights as weights_lib

serve = engines.serve
END = fake_sglang.ids("<end>")


def _changed(policy, share, seed=0):
  """Returns a policy with a share of its weights changed."""
  rng = np.random.default_rng(seed)

  def change(p):
    where = rng.random(p.shape) < share
    return np.where(where, p + rng.normal(0, 1, p.shape), p).astype(np.float32)

  return policy._replace(params=jax.tree.map(change, policy.params))


def _files(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_a_patched_copy_has_the_bytes_of_the_new_folder(tmp_path, dtype, share):
  old, new, copies = (tmp_path / x for x in ("a.0-0", "a.1-1", "copies"))
  policy = engines.policy()
  # Several files, with an index.
  hf.save(old, policy, dtype=dtype, shard_bytes=600)
  hf.save(new, _changed(policy, share), dtype=dtype, shard_bytes=600)
  assert len(list(old.glob("*.safetensors"))) > 2
  shutil.copytree(old, copies / old.name)
  path = tmp_path / "a.1-1.delta"
  delta.write(path, old, new)
  delta.apply(path, copies)
  assert _files(copies / new.name) == _files(new)
  assert [p.name for p in copies.iterdir()] == [new.name]
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
    [old.name, new.name, copies.name, path.name]
  )


def test_few_changed_weights_take_few_bytes(tmp_path):
  rng = np.random.default_rng(0)
  a = rng.normal(0, 0.02, (512, 1024)).astype(np.float32)
  for name, weights in (("a", a), ("b", a + (rng.random(a.shape) < 0.02) * a)):
    (tmp_path / name).mkdir()
    tensor = np.asarray(jnp.asarray(weights, jnp.bfloat16))
    fake_sglang.safetensors.numpy.save_file(
      {"w": tensor}, tmp_path / name / "model.safetensors"
    )
  delta.write(tmp_path / "b.delta", tmp_path / "a", tmp_path / "b")
  # 2 % of values: an entropy of .14 bits a value, and their new bits.
  assert 0.005 < (tmp_path / "b.delta").stat().st_size / (2 * a.size) < 0.03


@pytest.fixture
def pair(tmp_path):
  """Returns a delta, and a folder with a copy of its base."""
  old, new, copies = (tmp_path / x for x in ("a.0-0", "a.1-1", "copies"))
  hf.save(old, engines.policy())
  hf.save(new, _changed(engines.policy(), 0.1))
  shutil.copytree(old, copies / old.name)
  path = tmp_path / "a.1-1.delta"
  delta.write(path, old, new)
  return path, copies


def test_a_damaged_delta_leaves_the_copy(pair):
  path, copies = pair
  whole, before = path.read_bytes(), _files(copies / "a.0-0")
  places = np.random.default_rng(0).integers(0, len(whole), 40)
  for place in (0, 33, 39, len(whole) - 1, *places):
    damaged = bytearray(whole)
    damaged[place] ^= 1 << (place % 8)
    for content in (bytes(damaged), whole[:place]):
      path.write_bytes(content)
      with pytest.raises(ValueError, match="damaged delta, expected a whole"):
        delta.apply(path, copies)
  assert _files(copies / "a.0-0") == before
  path.write_bytes(whole)
  delta.apply(path, copies)


def test_a_delta_of_another_base_is_refused(pair):
  path, copies = pair
  (copies / "a.0-0").rename(copies / "a.9-9")
  with pytest.raises(ValueError, match=r"delta of 'a.0-0', found \['a.9-9'\]"):
    delta.apply(path, copies)


def test_a_damaged_copy_is_removed_and_never_served(pair):
  path, copies = pair
  file = copies / "a.0-0" / "model.safetensors"
  content = bytearray(file.read_bytes())
  content[-1] ^= 1
  file.write_bytes(content)
  with pytest.raises(ValueError, match="another checksum than expected"):
    delta.apply(path, copies)
  assert not list(copies.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_damage_in_any_chunk_is_found(tmp_path, monkeypatch, share):
  """A chunk that a version does not change is checked too."""
  monkeypatch.setattr(delta, "_CHUNK_VALUES", 64)
  old, new, copies = (tmp_path / x for x in ("a.0-0", "a.1-1", "copies"))
  policy = engines.policy()
  hf.save(old, policy)
  hf.save(new, _changed(policy, share) if share else policy)
  path = tmp_path / "a.1-1.delta"
  delta.write(path, old, new)
  size = (old / "model.safetensors").stat().st_size
  for place in np.linspace(0, size - 1, 25, dtype=int):
    shutil.rmtree(copies, ignore_errors=True)
    shutil.copytree(old, copies / old.name)
    with open(copies / old.name / "model.safetensors", "rb+") as file:
      file.seek(place)
      (byte,) = file.read(1)
      file.seek(place)
      file.write(bytes([byte ^ 4]))
    with pytest.raises(ValueError, match="another checksum than expected"):
      delta.apply(path, copies)
    assert not list(copies.iterdir())


def _forge(path, change, extra=()):
  """Writes a delta again with another index; its own checksum is right."""
  with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
    contents = {name: archive.read(name) for name in archive.namelist()}
  index = json.loads(contents["index.json"])
  change(index)
  contents["index.json"] = json.dumps(index).encode()
  contents |= dict(extra)
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, content in contents.items():
      archive.writestr(name, content)
  body = file.getvalue()
  path.write_bytes(body + hashlib.sha256(body).digest())


@pytest.mark.parametrize("base", ["../victim", "{}/victim", "..", ".", "", 3])
def test_a_delta_patches_no_folder_but_a_copy(pair, base):
  path, copies = pair
  victim = copies.parent / "victim"
  shutil.copytree(copies / "a.0-0", victim)
  before = _files(victim)
  name = base.format(copies.parent) if isinstance(base, str) else base
  _forge(path, lambda index: index.update(base=name))
  with pytest.raises(ValueError, match="is a delta of .*, found "):
    delta.apply(path, copies)
  assert _files(victim) == before
  assert _files(copies / "a.0-0") == before


@pytest.mark.parametrize("name", ["config.json", "..", "link", "../victim"])
def test_a_delta_patches_no_file_but_the_copys_weights(pair, name):
  path, copies = pair
  victim = copies.parent / "victim"
  victim.write_bytes(b"0123")
  (copies / "a.0-0" / "link").symlink_to(victim)
  before = _files(copies / "a.0-0")
  planes = {
    f"{name}/0/gaps": np.asarray([1, 0, 0, 0], np.uint8).tobytes(),
    f"{name}/0/xor": np.asarray([1, 1], np.uint8).tobytes(),
  }
  digest = hashlib.sha256(b"1023").hexdigest()
  _forge(path, lambda x: x["sha256"].update({f"{name}/0": digest}), planes)
  with pytest.raises(ValueError, match="has chunks of other files than those"):
    delta.apply(path, copies)
  assert victim.read_bytes() == b"0123"
  assert _files(copies / "a.0-0") == before


@pytest.mark.parametrize("end", ["gaps", "xor"])
def test_a_delta_is_unpacked_up_to_the_size_of_its_copy(pair, end):
  """100 MB of zeros, which take 100 kB in the file."""
  path, copies = pair
  bomb = {f"model.safetensors/0/{end}": bytes(10**8)}
  _forge(path, lambda index: None, bomb)
  tracemalloc.start()
  try:
    with pytest.raises(ValueError, match="has 100000000 bytes, expected at m"):
      delta.apply(path, copies)
    assert tracemalloc.get_traced_memory()[1] < 10**7
  finally:
    tracemalloc.stop()


@pytest.mark.parametrize(
  ("index", "extra"),
  [
    ([], {}),
    ({"base": "a.0-0"}, {}),
    ({"base": "a.0-0", "sha256": 3}, {}),
    (None, {"model.safetensors/0/gaps": b"\xff" * 4}),
    (None, {"model.safetensors/0/gaps": b"\xff" * 3}),
  ],
)
def test_a_forged_delta_is_refused_like_a_damaged_one(pair, index, extra):
  path, copies = pair
  if index is None:
    _forge(path, lambda index: None, extra)
  else:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
      archive.writestr("index.json", json.dumps(index))
    body = file.getvalue()
    path.write_bytes(body + hashlib.sha256(body).digest())
  with pytest.raises(ValueError, match="found a delta that does not fit"):
    delta.apply(path, copies)
  assert not list(copies.glob("*.writing"))


def test_folders_of_different_shapes_have_no_delta(tmp_path):
  hf.save(tmp_path / "a", engines.policy())
  hf.save(tmp_path / "b", engines.policy(), dtype="bfloat16")
  with pytest.raises(ValueError, match="found other tensors than in"):
    delta.write(tmp_path / "b.delta", tmp_path / "a", tmp_path / "b")


@pytest.fixture
def following(serve, tmp_path, monkeypatch):
  """Starts a server, its host's process, and an engine that sends deltas."""
  monkeypatch.setattr(delta, "COPIES", tmp_path / "copies")
  monkeypatch.setattr(server_lib, "_PATCH_POLL_SECONDS", 0.05)
  shared, started = tmp_path / "shared", []

  def follow():
    # As launch/serve_sglang.sh starts it: without this project's packages.
    started.append(
      subprocess.Popen(
        [sys.executable, "-S", "-c", _BARE, delta.__file__, str(shared)]
        + [str(delta.COPIES), str(pathlib.Path(np.__file__).parents[1])],
        stderr=subprocess.PIPE,
        text=True,
      )
    )
    return started[-1]

  def start():
    return serve(END, deltas=True, weights=str(shared), wait=20, deadline=60.0)

  yield start, follow, shared
  for process in started:
    process.kill()
    process.communicate()


# Runs the module with NumPy and the standard library alone.
_BARE = """
import importlib, runpy, sys
numpy = sys.argv.pop()
sys.path.insert(0, numpy); importlib.import_module("numpy"); del sys.path[0]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _check(engine, version, policy):
  """Hands over a policy, and checks that the server samples it."""
  engine.counters.clear()
  engine.set_params(policy.params, version)
  (scores,) = engine.scores(engines.PROMPT).values()
  expected = policy_scores.log_probs(policy, engines.PROMPT)
  np.testing.assert_allclose(scores, expected, atol=0.03)
  assert engines.turn(engine).versions == (version,)


def _loaded(server):
  return server.bodies("/update_weights_from_disk")[-1]["model_path"]


def test_servers_load_copies_that_their_host_patches(following, caplog):
  start, follow, shared = following
  follow()
  engine, server = start()
  wait_for(lambda: (delta.COPIES / server.version).is_dir())
  whole = engine.counters["handover_bytes"]
  policy = engines.policy()
  for version in (1, 2, 3):
    policy = _changed(policy, 0.02, seed=version)
    _check(engine, version, policy)
    assert _loaded(server) == str(delta.COPIES / server.version)
    assert 0 < engine.counters["handover_bytes"] < whole / 2
  assert "whole folder" not in caplog.text
  # A server that is started again finds the copy.
  server.kill()
  server.restart()
  assert engines.turn(engine).versions == (3,)
  with pytest.raises(FileNotFoundError, match="a newer version was sent"):
    engine._sender.whole_folder("another")
  # One whose host lost it gets the whole folder, and then deltas again.
  shutil.rmtree(delta.COPIES / server.version)
  policy = _changed(policy, 0.02, seed=4)
  _check(engine, 4, policy)
  assert _loaded(server).startswith(str(shared))
  assert f"{server.url} gets the whole folder" in caplog.text
  assert "is a delta of" in caplog.text
  wait_for(lambda: (delta.COPIES / server.version).is_dir())
  policy = _changed(policy, 0.02, seed=5)
  _check(engine, 5, policy)
  assert _loaded(server) == str(delta.COPIES / server.version)
  ram = engine._written
  engine.close()
  assert not ram.exists() and not list(shared.iterdir())


def test_a_host_without_copies_gets_whole_folders(
  following, caplog, monkeypatch
):
  start, _, shared = following
  monkeypatch.setattr(server_lib, "_PATCH_SECONDS", 0.2)
  engine, server = start()
  _check(engine, 1, _changed(engines.policy(), 0.02))
  assert _loaded(server).startswith(str(shared))
  assert "gets the whole folder" in caplog.text


@pytest.mark.parametrize(
  "settings", [{}, {"weights": "shared", "colocated": True}]
)
def test_deltas_need_a_shared_folder_and_servers_of_their_own(settings):
  with pytest.raises(ValueError, match="servers.deltas: found it with"):
    engines.connect(urls=("http://a:1",), deltas=True, **settings)


def test_a_delta_that_cannot_be_written_is_an_error(following, monkeypatch):
  """It is raised before servers are asked; the next version is sent whole."""
  start, follow, _ = following
  follow()
  engine, server = start()
  asked = len(server.asked)

  def full(*unused):
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(delta, "write", full)
    with pytest.raises(disk.DiskError, match="could not be written: No space"):
      engine.set_params(_changed(engines.policy(), 0.02).params, 1)
  assert len(server.asked) == asked
  _check(engine, 2, _changed(engines.policy(), 0.02))


@pytest.mark.parametrize(("deltas", "refused"), [(True, True), (False, False)])
def test_a_folder_of_deltas_is_of_one_run(tmp_path, deltas, refused):
  settings = {"weights": str(tmp_path), "deltas": deltas}
  one, two = (
    config_lib.ServersConfig(urls=(f"http://{host}:1",), **settings)
    for host in "ab"
  )
  weights_lib.folder(one.weights, one.urls).mkdir()
  train.check_alone(one)
  found = contextlib.nullcontext()
  if refused:
    found = pytest.raises(ValueError, match="of another run, expected a folder")
  with found:
    train.check_alone(two)
