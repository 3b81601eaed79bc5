"""The texts of an environment, read from files that a user replaces."""

from __future__ import annotations

import hashlib

import prompt_files
import pytest
import scripted

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import prompts, protocol, wording
from anysearch_jax.methods import systems
from anysearch_jax.rollout import episode

GOOD = {
  "prompt": "You may search {B} times. {{not a slot}} {Question}",
  "over_budget": "Used up.\n",
  "no_action": "Neither.",
}


@pytest.fixture
def save(tmp_path):
  def saved(values, name="mine.toml"):
    path = tmp_path / name
    path.write_text(
      values if isinstance(values, str) else prompt_files.toml(values), "utf-8"
    )
    return str(path)

  return saved


def test_a_file_replaces_the_texts_of_an_environment(save):
  mine = systems.environment("search_r1", save(GOOD))
  shipped = systems.environment("search_r1")
  assert protocol.render(mine.plain, searches=3, question="{B}?") == (
    "You may search 3 times. {not a slot} {B}?"
  )
  assert (mine.scaffold, mine.over_budget) == (mine.plain, "Used up.\n")
  assert mine.stops == shipped.stops and mine.plain != shipped.plain
  # The turn rules of the environment stay.
  file = save(dict(systems.WORDINGS["zerosearch"].texts().values), "z.toml")
  assert systems.environment("zerosearch", file).turns_are_budget


@pytest.mark.parametrize(
  ("more", "expected"),
  [
    (
      {"system": "In {B}.", "prefill": "<think>{{"},
      "In 3.<|u|>You may search 3 times. {not a slot} Q<|a|><think>{",
    ),
    (
      {"system": "", "base": "{Question} {{C}} {B}:", "prefill": "x"},
      "Q {C} 3:",
    ),
    ({"prefill": "x"}, "<|u|>You may search 3 times. {not a slot} Q<|a|>x"),
  ],
)
def test_a_file_may_begin_the_conversation(more, expected, save):
  text, ids = episode.prompt(
    types.Question("q", "Q", ()),
    budget=3,
    scaffold=False,
    environment=systems.environment("search_r1", save(GOOD | more)),
    codec=scripted.CODEC,
  )
  marks = {scripted.USER: "<|u|>", scripted.ASSISTANT: "<|a|>"}
  for mark, short in marks.items():
    text = text.replace(mark, short)
  assert text == expected and scripted.CODEC.decode(ids)


@pytest.mark.parametrize("name", sorted(systems.WORDINGS))
def test_a_copy_of_the_shipped_file_is_the_same_texts(name, save):
  shipped = systems.WORDINGS[name].texts()
  copy = systems.WORDINGS[name].texts(save(dict(shipped.values)))
  assert (copy.values, copy.sha256) == (shipped.values, shipped.sha256)
  mine, theirs = systems.environment(name, copy.file), systems.environment(name)
  for text in ("scaffold", "plain", "over_budget", "no_action", "repeated"):
    assert getattr(mine, text) == getattr(theirs, text)


def test_every_shipped_environment_has_a_file():
  assert systems.WORDINGS.keys() == systems.ENVIRONMENTS.keys()
  used = {each.shipped for each in systems.WORDINGS.values()}
  used |= {each.units for each in systems.ENVIRONMENTS.values()}
  assert used == {path.name for path in wording.SHIPPED.iterdir()}


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    (
      {"prompt": GOOD["prompt"]},
      "found the texts prompt; expected no_action, over_budget, prompt",
    ),
    (
      GOOD | {"hint": ""},
      "found the texts hint, no_action, over_budget, prompt; expected",
    ),
    (GOOD | {"prompt": "{B}"}, "prompt: found no placeholder {Question}"),
    (GOOD | {"prompt": "{question}"}, "prompt: found '{question}', expected"),
    (GOOD | {"no_action": "{B}"}, r"no_action: found '{B}', .*\(none\)"),
    (GOOD | {"no_action": "a } b"}, "no_action: found Single '}' .*, expected"),
    (GOOD | {"prompt": "{{Question}}"}, "found no placeholder {Question}"),
    (GOOD | {"prompt": "{Question!r}"}, "prompt: found '{Question}', expected"),
    ("prompt = 3", "prompt: found int, expected a string"),
    ("prompt", "mine.toml: found .*; expected a file of TOML"),
  ],
)
def test_a_file_that_does_not_fit_is_refused(values, sentence, save):
  with pytest.raises(ValueError, match=sentence):
    systems.environment("search_r1", save(values))


def test_a_file_that_is_missing_or_binary_is_refused(tmp_path):
  with pytest.raises(ValueError, match="No such file"):
    systems.environment("search_r1", str(tmp_path / "none.toml"))
  (tmp_path / "bytes.toml").write_bytes(b"prompt = '\xff'")
  with pytest.raises(ValueError, match="decode byte 0xff in position 10"):
    systems.environment("search_r1", str(tmp_path / "bytes.toml"))


def test_an_environment_without_a_file_takes_none(save, monkeypatch):
  env = systems.environment("paper")
  monkeypatch.setitem(systems.ENVIRONMENTS, "own", env)
  assert systems.environment("own") is env
  assert systems.texts(config_lib.EpisodeConfig(prompts="own")) is None
  with pytest.raises(ValueError, match="'own', whose texts are no file"):
    systems.environment("own", save(GOOD))


PAPER = prompts.PROMPTS["paper"]


@pytest.mark.parametrize(
  ("text", "length", "digest"),
  [
    (
      PAPER.scaffold,
      2095,
      "8d1661e6772a078cbd6d6b40313118b5f9ce14e306e10c54f97a0d416a96ebfb",
    ),
    (
      PAPER.plain,
      1001,
      "72a05d61813ac57959052ba75ec6be77dac16b3bbee3d0ba227053b3e544e7a0",
    ),
  ],
  ids=["scaffold", "plain"],
)
def test_the_papers_prompts_are_verbatim(text, length, digest):
  assert len(text) == length
  assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_a_negative_budget_is_refused():
  with pytest.raises(ValueError, match=r"budget of -1 searches; expected 0"):
    budgets.of(-1)
