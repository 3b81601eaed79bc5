"""Hostile questions, documents and models, and damaged files of episodes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import operator
import re
from typing import NamedTuple

import hostile
import hypothesis
import numpy as np
import orjson
import pytest
import safetensors.numpy
import scripted
import study

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import prompts, records, scoring
from anysearch_jax.evaluation import columns, journal
from anysearch_jax.host import json_files
from anysearch_jax.methods import systems
from anysearch_jax.policy import tensor_files
from anysearch_jax.rollout import episode, episode_state

LARGE = config_lib.EpisodeConfig(max_generated=10**7, max_context=10**8)
# A short prompt, because encoding it takes most of the time.
SHORT = dataclasses.replace(LARGE, prompts="world")
ADDRESS = types.Address(rollout=0, question=0, sample=0)


def episode_of(tape):
  """Draws a question, turns, and search results."""

  def passage():
    return types.Passage(tape.text(1), tape.text(3), tape.text())

  return (
    tape.text(),
    tape.some(tape.turn, 5, least=1),
    tape.some(lambda: tape.some(passage, 2), 3, least=1),
  )


class Played(NamedTuple):
  """An episode, and the answers to its requests."""

  trajectory: types.Trajectory
  sampled: list[types.Generation]
  queries: list[str]


def play(
  text,
  said,
  found,
  *,
  budget,
  scaffold,
  config=SHORT,
  codec=scripted.CODEC,
  sample=scripted.turn,
):
  """Plays an episode with turns and search results, both repeated endlessly."""
  state = episode.start(
    types.Question("q", text, (hostile.GOLD,)),
    budget=budget,
    scaffold=scaffold,
    address=ADDRESS,
    config=config,
    environment=systems.of_episode(config),
    codec=codec,
  )
  sampled, queries = [], []
  while not isinstance(request := state.request, episode_state.Done):
    if isinstance(request, types.SearchRequest):
      event = episode_state.Retrieved(tuple(found[len(queries) % len(found)]))
      queries.append(request.query)
    else:
      event = sample(request, said[request.turn % len(said)])
      sampled.append(event)
    state = episode.step(state, event)
  return Played(request.trajectory, sampled, queries)


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
    environment=systems.of_episode(SHORT),
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("hostile")


EPISODE = study.row("a", questions=1, budgets=(2,)).episodes[0]


@hostile.cases(6_000)
@hypothesis.given(hostile.tapes(100))
def test_line_is_a_valid_episode_or_refused(tape):
  value = tape.pick((EPISODE, EPISODE, EPISODE, tape.value()))
  if tape.below(4):
    value = tape.change(value)
  line = json.dumps(value, default=str).encode()
  line = tape.pick((line, line, tape.damage(line), tape.raw()))
  lines = line.splitlines() or [line]
  try:
    found = list(columns.parse(lines, source="rows"))
  except ValueError as error:
    assert str(error).startswith("rows") and len(str(error)) < 600
    return
  sample = columns.Sample(2)
  for each in found:
    assert isinstance(each["spans"], list)
    assert isinstance(columns.dataset_of(each), str)
    sample.add(each)
  assert len(sample.episodes()) == min(2, len(found))


@hostile.cases(1_500)
@hypothesis.given(hostile.tapes(120))
def test_episode_round_trips_through_its_file(folder, tape):
  budget = tape.below(3)
  trajectory = play(*episode_of(tape), budget=budget, scaffold=True).trajectory
  row = records.episode(
    trajectory,
    systems.environment("paper").judge(trajectory),
    seed=3,
    prices=budgets_lib.Prices(),
  )
  path = folder / "rows.jsonl"
  with journal.Journal(path, 1, lambda row: row["seed"] - 3) as rows:
    rows.add(row)
    rows.finish()
  (found,) = journal.read(path)
  with path.open("rb") as lines:
    assert list(columns.parse(lines, source="rows")) == [found]
  assert found.keys() == row.keys()
  assert found["tokens"] == row["tokens"]
  assert [(each["author"], each["text"]) for each in found["spans"]] == [
    (span.author.name.lower(), hostile.whole(span.text))
    for span in trajectory.spans
  ]


@hostile.cases(1_500)
@hypothesis.given(hostile.tapes(80))
def test_damaged_journal_has_only_written_rows_or_is_refused(folder, tape):
  path = folder / "journal.jsonl"
  partial = folder / "journal.partial.jsonl"
  rows = [{"i": i, "text": tape.text(3)} for i in range(3)]
  lines = [hostile.as_json(row) + b"\n" for row in rows]
  foreign = {"i": tape.value(), "text": ""}
  lines.append(tape.pick((b"", hostile.as_json(foreign) + b"\n")))
  partial.write_bytes(tape.damage(b"".join(lines)))
  try:
    with journal.Journal(path, 3, operator.itemgetter("i")) as opened:
      for i, row in enumerate(rows):
        if i not in opened:
          opened.add(row)
      opened.finish()
  except ValueError as error:
    assert str(partial) in str(error)
    partial.unlink()
    return
  found = list(journal.read(path))
  assert [row["i"] for row in found] == [0, 1, 2]
  path.write_bytes(tape.damage(path.read_bytes()))
  try:
    assert all(isinstance(row, dict) for row in journal.read(path))
  except ValueError as error:
    assert str(path) in str(error)


@hostile.cases(1_500)
@hypothesis.given(hostile.tapes(80))
def test_a_json_file_is_an_object_or_refused(folder, tape):
  path = folder / "object.json"
  data = hostile.as_json(tape.pick(({"a": tape.value()}, tape.value())))
  path.write_bytes(tape.pick((data, tape.damage(data), tape.raw())))
  try:
    found = json_files.read(path)
  except ValueError as error:
    assert str(error).startswith(f"{path}: ")
    with contextlib.suppress(ValueError):  # orjson is stricter than Python.
      assert not isinstance(orjson.loads(path.read_bytes()), dict)
  else:
    assert isinstance(found, dict)


TENSORS = safetensors.numpy.save(
  {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float16)}
)
INDEX = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()


@hostile.cases(1_000)
@hypothesis.given(hostile.tapes(60))
def test_headers_of_tensors_are_read_or_refused(tmp_path_factory, tape):
  folder = tmp_path_factory.getbasetemp()
  data, index = TENSORS, INDEX
  if tape.below(3):
    name, data = tensor_files.SINGLE_NAME, tape.damage(data)
  else:
    index = hostile.as_json({"weight_map": tape.value()})
    index, name = tape.pick((index, INDEX)), "x.safetensors"
  (folder / tensor_files.SINGLE_NAME).unlink(missing_ok=True)
  (folder / tensor_files.INDEX_NAME).write_bytes(index)
  (folder / name).write_bytes(data)
  try:
    found = tensor_files.headers(folder)
  except ValueError as error:
    assert str(folder) in str(error)
  else:
    assert all(each.path.parent == folder for each in found.values())
