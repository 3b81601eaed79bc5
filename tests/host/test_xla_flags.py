"""The table of XLA's flags."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from anysearch_jax.host import xla_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = (
  xla_flags.Flag("xla_a", "true", "A reason."),
  xla_flags.Flag("xla_b", "3", "A reason."),
  xla_flags.Flag("xla_c", None, "A reason."),
)


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ("", "--xla_a=true --xla_b=3"),
    ("--xla_a=false", "--xla_a=false --xla_b=3"),
    ("--xla_b --xla_d=1", "--xla_b --xla_d=1 --xla_a=true"),
  ],
)
def test_flags_that_the_user_gives_are_kept(given, expected):
  assert xla_flags.merged(FLAGS, given) == expected


def test_every_flag_has_a_reason_and_is_listed_once():
  for flags in (*xla_flags.FLAGS.values(), xla_flags.ONE_THREAD):
    assert all(flag.why.endswith(".") for flag in flags)
    assert len({flag.name for flag in flags}) == len(flags)


def test_this_jaxlib_knows_every_flag():
  # XLA ends a process that names a flag it does not know. Those of TPUs are
  # libtpu's, which is not here.
  flags = [
    flag._replace(value=flag.value or "")
    for name in ("cuda", "cpu")
    for flag in (*xla_flags.FLAGS[name], *xla_flags.ONE_THREAD)
    if flag.value is not None or "command_buffer" in flag.name
  ]
  done = subprocess.run(
    [sys.executable, "-c", "import jax; jax.devices()"],
    env=os.environ
    | {"XLA_FLAGS": xla_flags.merged(flags, ""), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr
