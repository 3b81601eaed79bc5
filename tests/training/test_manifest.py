"""Tests manifests with a small folder and every kind of damage."""

from __future__ import annotations

import hashlib
import json

import pytest

from anysearch_jax.training import manifest


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "a").write_bytes(b"12345")
  (tmp_path / "b").mkdir()
  (tmp_path / "b" / "c").write_bytes(b"")
  manifest.write(tmp_path)
  return tmp_path


def test_it_lists_size_and_digest_of_every_file(folder):
  assert json.loads((folder / "manifest.json").read_text()) == {
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
  assert manifest.damage(folder) == ""


@pytest.mark.parametrize(
  ("path", "content", "sentence"),
  [
    ("a", b"12346", "/a is {'bytes': 5, "),
    ("a", b"1234", "/a is {'bytes': 4, "),
    ("a", None, "lacks a (1 files in all)"),
    ("b/c", None, "lacks b/c (1 files in all)"),
    ("b/d", b"", "has b/d, which"),
    ("manifest.json", None, "has no manifest.json"),
    ("manifest.json", b"null", "manifest.json cannot be read"),
    ("manifest.json", b"\xff", "manifest.json cannot be read"),
  ],
)
def test_damage_is_named(folder, path, content, sentence):
  if content is None:
    (folder / path).unlink()
  else:
    (folder / path).write_bytes(content)
  assert sentence in manifest.damage(folder)


def test_every_byte_of_a_manifest_counts(folder):
  path = folder / "manifest.json"
  content = path.read_bytes()
  for i in range(len(content.rstrip())):
    path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
    assert manifest.damage(folder)


def test_an_unreadable_file_is_damage(folder, monkeypatch):
  def bad_sector(*_):
    raise OSError(5, "Input/output error")

  monkeypatch.setattr(hashlib, "file_digest", bad_sector)
  assert "Input/output error" in manifest.damage(folder)


def test_a_late_file_enters_without_reading_the_others_again(folder):
  (folder / "late").write_bytes(b"not yet")
  known = manifest.write(folder, late=["late"])
  (folder / "late").write_bytes(b"final")
  assert manifest.damage(folder, late=["late"]) == ""
  assert "late" in manifest.damage(folder)
  (folder / "a").write_bytes(b"damaged before the second time")
  manifest.write(folder, known)
  assert "/a is " in manifest.damage(folder)
  (folder / "a").write_bytes(b"12345")
  assert manifest.damage(folder) == ""
  (folder / "late").write_bytes(b"fInal")
  assert "/late is " in manifest.damage(folder, late=["late"])
