"""The files of the source, for the tests that read it."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("anysearch_jax", "retrieval", "launch")


def files(*packages: str) -> list[pathlib.Path]:
  """Returns every module of the packages, by default of all."""
  return [
    path
    for package in packages or PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
  ]
