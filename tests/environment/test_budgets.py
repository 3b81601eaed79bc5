"""A budget as a value: its units, its texts, and what they cost."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import prompt_files
import pytest
import scripted

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import prompts, protocol, scoring, units
from anysearch_jax.methods import systems
from anysearch_jax.rollout import episode, episode_state
from anysearch_jax.types import Author, Span
from anysearch_jax.world import world, world_tokenizer

PRICES = budgets.Prices(search=5.0, input=0.2, output=1.0)

ANY = st.builds(
  budgets.Budget,
  searches=st.integers(0, 50) | st.just(budgets.UNCAPPED),
  tokens=st.integers(1, 5000) | st.just(budgets.UNCAPPED),
  dollars=st.floats(1e-6, 10) | st.just(math.inf),
  seconds=st.floats(0.1, 1000) | st.just(math.inf),
  prices=st.just(PRICES),
)


def test_number_is_a_budget_of_searches():
  assert budgets.of(5) == budgets.Budget(searches=5)
  assert str(budgets.of(5)) == "5" and budgets.parse(" 5") == budgets.of(5)
  assert budgets.of(5).units == ("searches",)
  assert budgets.of(5).beyond_searches == budgets.NO_CAPS


def test_text_names_units():
  found = budgets.parse("searches=3, tokens=256")
  assert found == budgets.Budget(searches=3, tokens=256)
  assert str(found) == "searches=3,tokens=256"
  assert str(budgets.parse("tokens=1234567")) == "tokens=1234567"
  long = budgets.Budget(seconds=1e16)
  assert budgets.parse(str(long)) == long
  dear = budgets.parse("dollars=2e-3,seconds=1.5", PRICES)
  assert (dear.dollars, dear.seconds, dear.prices) == (0.002, 1.5, PRICES)


@hypothesis.given(ANY)
def test_record_gives_the_budget_back(budget):
  assert budgets.from_record(budget.record()) == (budget)


@pytest.mark.parametrize(
  "text, word",
  [
    ("-3", "expected a number of searches, tokens, dollars, seconds"),
    ("searches=3,", "''"),
    ("searches=-1", "searches=-1"),
    ("searches=1.5", "searches=1.5"),
    ("pages=3", "pages=3"),
    ("tokens=3,tokens=4", "tokens twice"),
    ("tokens=0", "expected 1 or more"),
    ("seconds=0", "above 0"),
    ("tokens=9999999999", "9999999999 tokens"),
    ("dollars=1.2.3", "dollars=1.2.3"),
    ("searches=" + 400 * "9", "expected a number of searches"),
    ("seconds=1e999", "seconds=1e999"),
  ],
)
def test_bad_text_is_refused_with_what_was_expected(text, word):
  with pytest.raises(ValueError) as error:
    budgets.parse(text)
  assert word in str(error.value)


def test_nan_is_no_cap():
  with pytest.raises(ValueError, match="above 0"):
    budgets.Budget(seconds=math.nan)


def test_prompt_states_what_is_assigned():
  def rendered(budget):
    text, _ = episode.prompt(
      types.Question("q", "Q?", ()),
      budget=budget,
      scaffold=False,
      environment=prompts.PROMPTS["paper"],
      codec=scripted.CODEC,
    )
    return text

  old = rendered(3)
  assert rendered(budgets.of(3)) == old
  both = rendered(budgets.parse("searches=3,tokens=256"))
  stated = "You may write at most 256 tokens in all. "
  assert stated in both and both.replace(stated, "") == old
  text = rendered(budgets.parse("tokens=256"))
  assert "a total of unlimited searches" in text


def test_block_states_what_is_left():
  line = protocol.budget_line(3, 1)
  caps = budgets.parse("tokens=256,dollars=0.01,seconds=30", PRICES)
  used = {"tokens": 56, "dollars": 0.0025, "seconds": 4.0}
  assert units.state_remaining(line, "budget.toml", caps, used) == (
    "<budget>remaining=2; used=1; total=3 ; "
    "tokens remaining=200; used=56; total=256 ; "
    "dollars remaining=0.0075; used=0.0025; total=0.01 ; "
    "seconds remaining=26; used=4; total=30</budget>\n"
  )
  few = budgets.parse("dollars=0.0000004", PRICES)
  assert "at most 0.0000004 US" in units.state_assigned("budget.toml", few)
  assert (
    "remaining=0.00000027; used=0.00000013; total=0.0000004"
    in units.state_remaining(
      line, "budget.toml", few, {**used, "dollars": 1.3e-7}
    )
  )
  assert "remaining=0; used" in units.state_remaining(
    line, "budget.toml", few, {**used, "dollars": 4e-7 * (1 - 1e-9)}
  )
  assert units.state_remaining(line, "budget.toml", budgets.of(3), used) == line
  assert units.state_remaining("", "budget.toml", caps, used) == ""


def test_world_states_units_in_its_own_words():
  tokenizer = world_tokenizer.build_tokenizer(world.World())
  unknown = tokenizer.unk_token_id
  for env in systems.ENVIRONMENTS.values():
    if env.units != "budget_world.toml":
      continue
    caps = budgets.parse("tokens=137,dollars=0.07,seconds=900", PRICES)
    used = {"tokens": 56, "dollars": 0.0025, "seconds": 4.0}
    text = units.state_assigned(env.units, caps)
    assert text == "total= 13 ; ample 7 ; remaining= 20 ; "
    line = units.state_remaining(
      protocol.budget_line(3, 1), env.units, caps, used
    )
    assert line == protocol.budget_line(3, 1)
    for each in (text, line, units.texts(env.units).values["unlimited"]):
      assert unknown not in tokenizer.encode(each)


def test_budget_file_replaces_the_sentences(tmp_path):
  caps = budgets.parse("tokens=256,seconds=30")
  path = tmp_path / "mine.toml"
  values = {
    **units.texts("budget.toml").values,
    "tokens": "{N} tokens, not more. ",
    "tokens_left": "; {R} tokens",
  }
  path.write_text(prompt_files.toml(values))
  for file, start, block in (
    ("", "You may write at most 256", "tokens remaining=200"),
    (str(path), "256 tokens, not more. You have 30", "; 200 tokens ; seconds"),
    (units.SILENT, "Answer", "total=3</budget>"),
  ):
    config = config_lib.EpisodeConfig(budget_file=file)
    env = systems.of_episode(config)
    question = types.Question("q", "Q?", ())
    text, _ = episode.prompt(
      question,
      budget=dataclasses.replace(caps, searches=3),
      scaffold=False,
      environment=env,
      codec=scripted.CODEC,
    )
    assert start in text and (file != units.SILENT or "256" not in text)
    said = Author.MODEL, (1,) * 56, (0.0,) * 56, (0,) * 56, ""
    state = episode_state.Episode(
      *(types.Address(0, 0, 0), question, 3, True, config, scripted.CODEC, env),
      chunks=(episode_state.Chunk(*said),),
      caps=caps,
    )
    assert block in state.budget_line
    assert env is systems.of_episode(config)


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    (None, "No such file"),
    ('tokens = "{X}"', "found the texts tokens; expected dollars"),
  ],
)
def test_bad_budget_file_is_refused(tmp_path, text, expected):
  path = tmp_path / "mine.toml"
  if text is not None:
    path.write_text(text)
  config = config_lib.EpisodeConfig(budget_file=str(path))
  with pytest.raises(ValueError) as error:
    systems.of_episode(config)
  assert expected in str(error.value)
  assert "config.episode.budget_file" in str(error.value)


def test_format_needs_the_right_searches_before_other_units():
  def form(state):
    turn = "<think>x</think><answer>y</answer>"
    return scoring.check_format(
      [
        Span(Author.ENVIRONMENT, f"<budget>{state}</budget>\n"),
        Span(Author.MODEL, turn),
      ],
      budget=3,
      searches=0,
      scaffold=True,
    )

  assert form("remaining=3; used=0; total=3") == 1
  assert form("remaining=3; used=0; total=3 ; tokens remaining=9") == 1
  assert form("remaining=2; used=0; total=3 ; tokens remaining=9") == 0
