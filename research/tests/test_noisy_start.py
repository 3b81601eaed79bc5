"""The warm start of the noisy world: which words are decisions, its gates."""

from __future__ import annotations

import commands
import numpy as np

import anysearch_jax as aj
from research import noisy_agent, noisy_start, warm_start_settings
from research import noisy_world as world

SMALL = warm_start_settings.WarmStart(steps=2, demonstrations=12)


def test_the_shipped_policy_has_the_tokens_of_this_world():
  theirs = aj.load_policy(noisy_start._START).tokenizer.hf.get_vocab()
  assert theirs == noisy_agent.codec().hf.get_vocab()


def test_words_are_decisions_or_follow_from_what_is_known():
  a, b = world.VALUES[:2]
  seen = ((world.DEAR, b), (world.CHEAP, a), (world.CHEAP, a))
  here = noisy_agent.Situation("s", "mentor", 2, seen)
  for decision, act in (
    (world.DEAR, ["", "query", "", "form"]),
    (world.CHEAP, ["", "query", "", "form"]),
    (world.NOTHING, ["", "", "form"]),
    (a, ["", "", "form"]),
  ):
    words = noisy_agent.words(here, decision)
    counters = ["value", "count", "count"] * 2
    assert noisy_start.decisions(words) == [
      *("form", "form", "left", "form", "memory", "form", *counters, "form"),
      *act,
    ]
    found = " ".join(words).partition(" found ")[2].split()[:6]
    assert found == [b, "0", "1", a, "2", "0"]


def test_demonstrations_repeat():
  one, two = (
    noisy_start.demonstrated(world.get_config(), "dev", 12) for _ in range(2)
  )
  assert len({t.budget for t in one}) > 4
  for mine, other in zip(one, two, strict=True):
    np.testing.assert_array_equal(mine.token_ids, other.token_ids)


def test_a_weak_policy_is_rejected(tmp_path, monkeypatch):
  monkeypatch.setattr(world, "get_warm_start", lambda: SMALL)
  monkeypatch.setattr(noisy_start, "_PROBED", 3)
  monkeypatch.setattr(noisy_start, "_PLAYED", 2)
  said = commands.run(noisy_start, f"--output={tmp_path / 'made'}")
  assert "too weak" in said and "count: found" in said
  assert "reward at B = 8: found" in said
  assert aj.load_policy(tmp_path / "made.rejected").params
  assert not (tmp_path / "made.partial").exists()
