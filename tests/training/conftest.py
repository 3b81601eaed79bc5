"""Runs that several files share."""

from __future__ import annotations

import pytest
import scripted_runs as runs
import small_run

from anysearch_jax.training import learner


@pytest.fixture(scope="session")
def parts():
  return small_run.parts()


@pytest.fixture(scope="session")
def trained(parts, tmp_path_factory):
  """The folder of an undisturbed run of the real engine and learner."""
  folder = tmp_path_factory.mktemp("trained")
  small_run.train(folder, parts)
  return folder


@pytest.fixture
def scripted(monkeypatch):
  """Replaces the trainer's learner by `scripted_runs.Learner`."""
  monkeypatch.setattr(learner, "Learner", runs.Learner)
  monkeypatch.setattr(runs.Learner, "on_step", lambda rollout, step: None)


@pytest.fixture(scope="session")
def finished(parts, tmp_path_factory):
  """Returns an undisturbed scripted run by level, see `runs.finished`."""
  return runs.finished(parts, tmp_path_factory)
