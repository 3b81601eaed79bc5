"""Episodes in which questions, documents and the model are all hostile."""

from __future__ import annotations

import dataclasses
import itertools
import re

import hostile
import hypothesis
import scripted
from hostile_episode import LARGE, SHORT, episode_of, play

from anysearch_jax import types
from anysearch_jax.environment import prompts, scoring
from anysearch_jax.rollout import episode

MODEL, ENVIRONMENT = types.Author.MODEL, types.Author.ENVIRONMENT
ANSWERS = [
  line
  for p in prompts.PROMPTS.values()
  for line in (p.over_budget, p.no_action)
]
CONTROL_IDS = {1_200_001, 1_200_002, 1_200_003}


def check(played, codec, special):
  """Checks the author of every token and the form of environment texts."""
  trajectory, sampled, queries = played
  if not len(trajectory.token_ids):
    assert not sampled and not trajectory.spans
    return
  authors = trajectory.authors.tolist()
  start = authors.count(types.Author.PROMPT)
  ids, by = trajectory.token_ids[:start].tolist(), [types.Author.PROMPT] * start
  rest, used = iter(sampled), 0
  for span in trajectory.spans:
    if span.author is MODEL:
      generation = next(rest)
      assert span.text == generation.text
      part = list(generation.token_ids)
    else:
      part = codec.encode(span.text)
      assert special.isdisjoint(part)
      used += check_environment(span.text, trajectory.budget, used)
    ids += part
    by += [span.author] * len(part)
  assert next(rest, None) is None
  assert trajectory.token_ids.tolist() == ids
  assert authors == by
  of_model = trajectory.authors == MODEL
  assert (trajectory.versions >= 0).tolist() == of_model.tolist()
  assert not trajectory.logps[~of_model].any()
  for name in ("logps", "versions"):
    told = [x for each in sampled for x in getattr(each, name)]
    assert getattr(trajectory, name)[of_model].tolist() == told
  truncated = trajectory.outcome is types.Outcome.TRUNCATED
  assert bool(trajectory.reason) == truncated
  assert trajectory.queries == tuple(queries)
  # The last observation is missing if it did not fit into the context.
  assert len(queries) - 1 <= used <= len(queries) == trajectory.searches
  assert trajectory.searches <= trajectory.budget


def check_environment(text, budget, used):
  """Checks a text of the environment; returns whether it is an observation."""
  if text in ANSWERS:
    return False
  tags = re.findall("|".join(hostile.TAGS), text.casefold())
  if tags == ["<budget>", "</budget>"]:
    left = f"remaining={budget - used}; used={used}; total={budget}"
    assert text == f"<budget>{left}</budget>\n"
    return False
  assert tags == ["<information>", "</information>"]
  assert text.startswith("\n\n<information>")
  assert text.endswith("</information>\n\n")
  return True


@hostile.cases(5_000)
@hypothesis.given(hostile.tapes(120))
def test_hostile_episode_has_consistent_authors_and_counts(tape):
  budget, scaffold = tape.below(4), tape.pick((False, True))
  most = tape.pick((10**6, 1 + tape.place(300)))
  spare = tape.pick((10**6, tape.place(900) - 5))
  text, said, found = episode_of(tape)
  question = types.Question("q", text, (hostile.GOLD,))
  _, ids = episode.prompt(
    question,
    budget=budget,
    scaffold=scaffold,
    config=SHORT,
    codec=scripted.CODEC,
  )
  assert sum(i in CONTROL_IDS for i in ids) == 2
  config = dataclasses.replace(
    SHORT, max_generated=most, max_context=max(1, len(ids) + spare)
  )
  played = play(
    text, said, found, budget=budget, scaffold=scaffold, config=config
  )
  check(played, scripted.CODEC, CONTROL_IDS)
  assert played.trajectory.generated_tokens <= most
  assert len(played.trajectory.token_ids) <= config.max_context
  assert len(played.sampled) <= budget + config.answered_bad_turns + 1
  assert played.trajectory.outcome is not types.Outcome.FAILED


def verdict_of(played, scaffold):
  trajectory = played.trajectory
  verdict = scoring.judge(
    trajectory.spans,
    golden_answers=trajectory.question.golden_answers,
    budget=trajectory.budget,
    searches=trajectory.searches,
    scaffold=scaffold,
  )
  said = (trajectory.outcome, trajectory.violation, trajectory.queries)
  return verdict, said, [each.text for each in played.sampled]


@hostile.cases(4_000)
@hypothesis.given(hostile.tapes(120))
def test_verdict_does_not_depend_on_document_texts(tape):
  budget, scaffold = tape.below(4), tape.pick((False, True))
  text, said, found = episode_of(tape)
  plain = [[types.Passage("1", "Lima", "A city.")]]
  verdicts = [
    verdict_of(play(*world, budget=budget, scaffold=scaffold), scaffold)
    for world in ((text, said, found), ("Where?", said, plain))
  ]
  assert verdicts[0] == verdicts[1]
  verdict, _, texts = verdicts[0]
  # Documents and question contain the answer, the model's text does not.
  assert verdict.em == scoring.f1(verdict.answer, (hostile.GOLD,)) == 0
  assert verdict.answer is None or any(verdict.answer in each for each in texts)


def sampler(tokenizer):
  """Like `scripted.turn`, but with a real tokenizer."""
  (end,) = tokenizer.encode(tokenizer.hf.eos_token)

  def sample(request, text):
    text = text.encode(errors="replace").decode()
    ids = [*tokenizer.encode(text), end]
    for n in range(1, len(ids) + 1):
      said = request.cut(tokenizer.decode(ids[:n]))
      if said is not None or ids[n - 1] in tokenizer.end_of_turn_ids:
        break
    ids = tuple(ids[:n])
    finish = types.Finish.END_OF_TURN if said is None else types.Finish.STOP
    return types.Generation(
      ids,
      (-1.0,) * n,
      tokenizer.decode(ids) if said is None else said,
      finish,
      (0,) * n,
    )

  return sample


def test_real_tokenizers_never_mix_authors(real_tokenizer):
  special = set(real_tokenizer.hf.all_special_ids) | set(
    itertools.chain.from_iterable(
      real_tokenizer.encode(token) for token in real_tokenizer.control_tokens
    )
  )
  sample = sampler(real_tokenizer)

  def control(ids):
    return [i for i in ids if i in special]

  @hostile.cases(250)
  @hypothesis.given(hostile.tapes(120))
  def keep(tape):
    budget, scaffold = tape.below(3), tape.pick((False, True))
    text, said, found = episode_of(tape)
    played, plain = (
      play(
        asked,
        said,
        found,
        budget=budget,
        scaffold=scaffold,
        config=LARGE,
        codec=real_tokenizer,
        sample=sample,
      )
      for asked in (text, "Where?")
    )
    check(played, real_tokenizer, special)
    prompt, expected = (
      each.trajectory.token_ids[each.trajectory.authors == 0]
      for each in (played, plain)
    )
    assert control(prompt.tolist()) == control(expected.tolist())

  keep()
