"""Tests that a configuration which cannot run is refused with a sentence."""

from __future__ import annotations

import dataclasses
import re
import typing

import numpy as np
import pytest
import small_run
import spoken

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.training import rewards_and_advantages


def changed(part, **values):
  """The small run's configuration with some values of one part replaced."""
  return config_lib.changed(small_run.CONFIG, **{part: values})


@pytest.mark.parametrize(
  ("part", "values"),
  [
    ("objective", {"reduction": "token-mean"}),
    ("objective", {"normalize": "batch"}),
    ("objective", {"old_logp": "trainer"}),
    ("objective", {"old_logp": "trainer", "importance_cap": 2.0}),
    ("objective", {"old_logp": "engine", "importance_cap": 3.0}),
    ("batch", {"remat": "none", "attention": "auto"}),
    ("batch", {"remat": "dots", "attention": "xla"}),
    ("batch", {"remat": "attention", "attention": "cudnn"}),
    ("batch", {"remat": "full", "attention": "splash"}),
    ("batch", {"max_segments": 1, "attention_chunk": 1, "logprob_chunk": 1}),
    ("mesh", {"tensor": 4, "sequence_parallel": True}),
    # 128 is not a multiple of 3; only sequence parallelism needs that.
    ("mesh", {"tensor": 3}),
    ("mesh", {"fsdp": 4, "trainer": (0, 1, 2, 3), "rollout": (4, 5, 6, 7)}),
    # Four processes; the two training devices of each also sample.
    ("mesh", {"data": 2, "fsdp": 4, "trainer": (3, 1), "rollout": (1, 3)}),
    # More devices than any machine has: validation does not look at devices.
    ("mesh", {"data": 4096}),
  ],
)
def test_a_valid_configuration_is_accepted(part, values):
  systems.validate(changed(part, **values))


def test_rule_that_steers_is_refused_in_a_training(tmp_path):
  rule = tmp_path / "rule.py"
  rule.write_text(
    "import dataclasses\n"
    "import anysearch_jax as aj\n"
    "world = aj.get_environment('world')\n"
    "world = dataclasses.replace(world, step=aj.episode.step)\n"
    "MINE = aj.Method('mine', 'Mine', {'world': world})\n"
  )
  config = changed("episode", prompts=f"{rule}:MINE#world")
  systems.validate(config, trains=False)
  with pytest.raises(ValueError, match="prompts of method.name anysearch"):
    systems.validate(config)


@pytest.mark.parametrize(
  ("part", "values", "sentence"),
  [
    (
      "objective",
      {"importance_cap": 1.0},
      "objective.importance_cap: found 1.0 with old_logp 'engine'",
    ),
    ("batch", {"row_lengths": ()}, "batch.row_lengths: found ()"),
    ("batch", {"row_lengths": (128, 128)}, "expected ascending numbers"),
    (
      "mesh",
      {"tensor": 3, "sequence_parallel": True},
      "batch.row_lengths: found a row of 128 tokens, expected multiples of 3, "
      "over which positions are cut",
    ),
    ("mesh", {"context": 3}, "expected multiples of 3"),
    (
      "mesh",
      {"fsdp": 2, "trainer": (1, 1)},
      "mesh.trainer: found (1, 1), expected each once.",
    ),
    (
      "mesh",
      {"data": 2, "fsdp": 2, "trainer": (0, 1, 2)},
      "mesh.trainer: found 3 devices of each process for a mesh of data 2 x "
      "fsdp 2 x tensor 1 = 4; expected a number that divides it.",
    ),
  ],
)
def test_an_invalid_configuration_is_refused(part, values, sentence):
  with pytest.raises(ValueError, match=re.escape(sentence)):
    systems.validate(changed(part, **values))


def test_trajectories_without_searches_need_others_of_their_kind(tmp_path):
  file = tmp_path / "turns.py"
  file.write_text(
    "import dataclasses\n"
    "import anysearch_jax as aj\n"
    "METHOD = dataclasses.replace(\n"
    "  aj.get_method('search_r1'), turns=lambda trajectories, constants: {}\n"
    ")\n"
  )
  turns = f"{file}:METHOD"
  config = config_lib.changed(small_run.CONFIG, group=4, searchless=2)
  systems.validate(config)
  for changes, sentence in (
    ({"searchless": 3}, "searchless: found 3 of 4 trajectories"),
    ({"objective": {"baseline": "turn"}}, "found 'turn' with 2 trajectories"),
    (
      {
        "method": {"name": turns},
        "episode": {"prompts": f"{turns}#search_r1"},
      },
      "and 2 trajectories without searches, expected 'group' and 0",
    ),
  ):
    with pytest.raises(ValueError, match=re.escape(sentence)):
      systems.validate(config_lib.changed(config, **changes))


@pytest.mark.parametrize(
  "method", [m for m in systems.METHODS.values() if m.reward]
)
@pytest.mark.parametrize("world", [False, True])
def test_reward_metric_names_are_known_before_a_rollout(method, world):
  prompts = tuple(method.environments)[-1 if world else 0]
  has_variant = world and method.name == "search_r1"
  options = ("format_variant=true",) if has_variant else ()
  config = dataclasses.replace(
    small_run.CONFIG,
    method=config_lib.MethodConfig(method.name, options=options),
    episode=dataclasses.replace(small_run.CONFIG.episode, prompts=prompts),
  )
  question = types.Question(
    "q", "where?", ("tol",), metadata={"search_keys": [["where"]]}
  )
  played = types.Group(
    question, 4, False, (spoken.trajectory(question, ("x", None)),) * 2
  )
  trained = systems.trained(config)
  scored = rewards_and_advantages.score(
    [played],
    np.array([4]),
    samples=config.group,
    method=trained,
    objective=config.objective,
  )
  names = {
    n for n in rewards_and_advantages.metrics(scored) if n.startswith("reward/")
  }
  assert {"reward/em", "reward/total"} <= names
  found = rewards_and_advantages.reward_metrics(
    trained, samples=2, max_budget=4, traced=True
  )
  assert found == names


def test_an_unknown_best_metric_is_refused_before_a_rollout():
  for wrong in ("reward/emm", "em", "policy/entropy", ""):
    with pytest.raises(ValueError) as refusal:
      systems.validate(changed("checkpoint", keep_best=1, best_metric=wrong))
    assert str(refusal.value) == (
      f"checkpoint.best_metric: found {wrong!r}, expected one of reward/em, "
      "reward/format, reward/gamma, reward/length, reward/tool, reward/total."
    )
    systems.validate(changed("checkpoint", keep_best=0, best_metric=wrong))
  systems.validate(changed("checkpoint", keep_best=1))


def paths_of_numbers(cls, path=""):
  """Yields the dotted paths of a configuration's numbers and number tuples."""
  for name, hint in typing.get_type_hints(cls).items():
    name = f"{path}.{name}" if path else name
    if dataclasses.is_dataclass(hint):
      yield from paths_of_numbers(hint, name)
    elif {hint, *typing.get_args(hint)} & {int, float}:
      yield name


def replaced(config, path, value):
  name, _, rest = path.partition(".")
  if rest:
    value = replaced(getattr(config, name), rest, value)
  return dataclasses.replace(config, **{name: value})


@pytest.mark.parametrize(
  "path", sorted(paths_of_numbers(config_lib.ExperimentConfig))
)
def test_every_number_has_bounds(path):
  value = small_run.CONFIG
  for name in path.split("."):
    value = getattr(value, name)
  for wrong in (float("nan"), float("inf"), -(2**31)):
    wrong = (wrong,) if isinstance(value, tuple) else wrong
    with pytest.raises(ValueError, match=rf"^{re.escape(path)}(\[0\])?: found"):
      systems.validate(replaced(small_run.CONFIG, path, wrong))
