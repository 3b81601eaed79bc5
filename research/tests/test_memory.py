"""The memory experiment: each stage against values that are made by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json

import commands
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import anysearch_jax as aj
from anysearch_jax.configs import objectives
from research import outcomes, study
from research.memory import (
  chains,
  configuration,
  decisions,
  forced,
  hidden,
  memories,
  predictions,
  results,
  rows,
  selection,
)

_QUESTIONS = {
  "who": "who wrote book {}?",
  "when": "when was book {} written?",
  "where": "where was book {} written?",
}


def _turn(thought, act, text):
  return {
    "author": "model",
    "text": f"<think>{thought}</think>\n<{act}>{text}</{act}>",
  }


def _chain(id_, question, answer, *, budget=2, found_at=1, **more):
  """Returns a row as `anysearch demonstrate` writes it; 0: nothing is found."""
  searches = found_at or budget
  spans = []
  for k in range(searches):
    spans.append(_turn(f"{budget - k} of {budget} left.", "search", question))
    text = answer if k + 1 == found_at else "nothing"
    spans.append(
      {
        "author": "environment",
        "text": f"\n\n<information>Doc 1 {text}</information>\n\n",
      }
    )
  said = answer if found_at else "unknown"
  spans.append(_turn("Quote.", "answer", said))
  return {
    "question_id": id_,
    "question": question,
    "golden_answers": [answer],
    "dataset": "nq",
    "budget": budget,
    "scaffold": False,
    "failed": False,
    "em": int(bool(found_at)),
    "searches": searches,
    "spans": spans,
    "metadata": {"split": "train"},
    **more,
  }


def _questions(count=10):
  return [
    _chain(f"{form}{i}", text.format(i), f"{form} answer {i}")
    for form, text in _QUESTIONS.items()
    for i in range(count)
  ]


class TestMemories:
  @pytest.mark.parametrize(
    ("question", "form"),
    [
      ("Who wrote it?", "who"),
      ("in the year when he died", "when"),
      ("Where and when was he born?", ""),
      ("whose whenever elsewhere", ""),
      ("In which South American country is it?", "where"),
      ("what year was it", "when"),
      ("who ruled which country", ""),
    ],
  )
  def test_a_question_has_its_only_form(self, question, form):
    assert memories.form_of(question) == form

  def test_shares_are_exact_and_wrong_memories_are_wrong(self):
    asked = _questions(40)
    found, others = asked[::2], asked[1::2]
    some = memories.remember(found, others, "train", most=20, seed=1)
    again = memories.remember(
      found[::-1], others[::-1], "train", most=20, seed=1
    )
    assert some == again
    other = memories.remember(found, others, "train", most=20, seed=2)
    assert [m.is_right for m in some] == [m.is_right for m in other]
    assert some != other
    for form, reliability in memories.RELIABILITY.items():
      own = [m for m in some if m.form == form]
      assert len(own) == len({m.question["question_id"] for m in own}) == 20
      assert sum(m.question in found for m in own) == 15
      assert sum(m.is_right for m in own) == 20 * reliability
      # What is found says nothing of what is remembered.
      assert any(m.question in others and m.is_right for m in own)
      assert any(m.question in found and not m.is_right for m in own)
      for m in own:
        golds = m.question["golden_answers"]
        assert aj.scoring.exact_match(m.answer, golds) == m.is_right
        assert m.answer.startswith(form)

  def test_multi_hop_questions_are_left_out(self):
    asked = [
      _chain("a", "who a?", "x"),
      _chain("a", "who a?", "x", budget=1, found_at=0),
      _chain("b", "who b?", "x", found_at=0),
      _chain("c", "who c?", "x", budget=3, found_at=3),
      _chain("d", "who d?", "x", metadata={"hops": 2}),
    ]
    found, others = memories.by_search(asked)
    assert [row["question_id"] for row in found] == ["a"]
    assert [row["question_id"] for row in others] == ["b", "c"]

  @pytest.mark.parametrize(("found_at", "searches"), [(0, 2), (1, 1), (2, 2)])
  def test_turns_begin_with_decisions_and_keep_their_form(
    self, found_at, searches
  ):
    row = _chain("a", "who a?", "gold", found_at=found_at)
    memory = memories.Memory(row, "train", "who", "remembered", False)
    made = memories.searched(memory, row)
    texts = [s["text"] for s in made["spans"] if s["author"] == "model"]
    decided = [t.removeprefix("<think>").split()[0] for t in texts]
    assert decided == [memories.SEARCH] * searches + [memories.ANSWER]
    said = "gold" if found_at else "remembered"
    assert texts[-1].endswith(f"<answer>{said}</answer>")
    assert all("Search." in t or "Answer." in t for t in texts)
    for one, count in ((made, searches), (memories.closed_book(memory, 2), 0)):
      spans = [
        aj.Span(aj.Author[s["author"].upper()], s["text"]) for s in one["spans"]
      ]
      assert aj.scoring.check_format(
        spans, budget=2, searches=count, scaffold=False
      )

  def test_half_of_the_warm_rows_search(self):
    asked = _questions(4)
    some = memories.remember(asked, [], "train", most=4, seed=0)
    three = [dict(row, budget=3) for row in asked]
    made = memories.warm_rows(some, [*asked, *three], seed=0)
    lengths = [len(row["spans"]) > 1 for row in made]
    assert lengths == [True, False] * len(some)
    assert {row["budget"] for row in made} == {2, 3}

  def test_command(self, tmp_path):
    for split in ("train", "test"):
      folder = tmp_path / split / "played"
      folder.mkdir(parents=True)
      asked = [*_questions(6), _chain("x", "which is it?", "x")]
      asked += [
        _chain(f"{form}y", text.format("y"), "gold", found_at=0)
        for form, text in _QUESTIONS.items()
      ]
      aj.records.write(folder / "episodes.jsonl", asked)
    ended = commands.run(
      memories,
      f"--trained={tmp_path / 'train'}",
      f"--evaluated={tmp_path / 'test'}",
      f"--output={tmp_path}",
      "--most=5,2",
    )
    assert ended == ""
    book = list(aj.read_episodes(tmp_path / "memory/episodes.jsonl"))
    # Of five, four are found; of two, two.
    assert len(book) == 3 * (5 + 2)
    assert {row["budget"] for row in book} == {0}
    assert len(list(aj.read_episodes(tmp_path / "warm/episodes.jsonl"))) == 30
    other = (tmp_path / "questions/other_test.jsonl").read_text()
    assert json.loads(other)["question"] == "which is it?"


class _Echo:
  """An engine that records what it is asked, and answers one token."""

  def __init__(self):
    self.requests = []

  async def generate(self, request):
    self.requests.append(request)
    return aj.Generation((7,), (-0.5,), " x", aj.Finish.STOP, (3,))

  def release(self, address):
    self.released = address


class _Letters:
  def encode(self, text):
    return [ord(letter) for letter in text]


def test_decisions_are_forced_by_depth():
  engine = _Echo()
  player = forced.Forced(engine, _Letters())
  address = aj.evaluation_address("q", seed=1, variant=0)
  for turn, words in ((0, "<think>Search."), (1, "<think>Answer.")):
    request = aj.GenerateRequest(address, turn, (1, 2), 50, ("</search>",))
    made = asyncio.run(player.generate(request))
    ids = tuple(map(ord, words))
    assert engine.requests[-1].token_ids == (1, 2, *ids)
    assert engine.requests[-1].max_tokens == 50 - len(ids)
    assert made.token_ids == (*ids, 7)
    assert made.text == words + " x"
    assert len(made.logps) == len(made.versions) == len(ids) + 1
    assert made.logps[-1] == -0.5
  player.release(address)
  assert engine.released == address


def _chains(right, found, forms, searches=None):
  right, found = np.array(right, bool), np.array(found, bool)
  if searches is None:
    searches = np.broadcast_to(np.arange(right.shape[1]), right.shape)
  ids = tuple(f"q{i:03d}" for i in range(len(right)))
  return chains.Chains(
    ids,
    tuple(forms),
    right,
    np.ones_like(right),
    found,
    np.array(searches),
    np.full(right.shape, 20),
  )


def test_what_is_measured_by_hand():
  m = chains.measured(
    _chains(
      right=[[1, 1, 0], [1, 1, 0], [0, 1, 1], [0, 0, 0]],
      found=[[0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 0]],
      forms=["who"] * 4,
    )
  )
  assert (m.questions, m.p, m.q) == (4, 0.5, (0.25, pytest.approx(1 / 3)))
  assert m.read == 0.5  # Row 2 at depth 1 is right, row 0 at depth 2 is not.
  assert m.kept == pytest.approx(2 / 3)  # Rows 0 and 1, three misses.
  assert m.lucky == 0


def test_the_optimum_is_that_of_all_rules():
  rng = np.random.default_rng(0)
  for _ in range(20):
    found = np.cumsum(rng.random((8, 4)) < 0.3, 1) > 0
    found[:, 0] = False
    right = rng.random((8, 4)) < np.where(found, 0.7, 0.4)
    some = _chains(right, found, ["who"] * 8)
    histories = sorted(
      {tuple(found[n, : d + 1]) for n in range(8) for d in range(3)}
    )
    best = 0
    for rule in itertools.product((False, True), repeat=len(histories)):
      goes_on = dict(zip(histories, rule, strict=True))
      total = 0
      for n in range(8):
        depth = 0
        while depth < 3 and goes_on[tuple(found[n, : depth + 1])]:
          depth += 1
        total += right[n, depth]
      best = max(best, total)
    stops = chains.optimum(some, 5)
    assert right[np.arange(8), stops].sum() == best
  # The budget binds, and so does a chain that ended early.
  right = [[0, 0, 1]] * 2
  short = _chains(right, np.zeros((2, 3)), ["who"] * 2, [[0, 1, 1], [0, 1, 2]])
  assert chains.optimum(short, 2).tolist() == [1, 2]
  assert chains.optimum(short, 1).tolist() == [0, 0]


def test_what_is_misread_is_left_out(tmp_path):
  some = _chains(
    right=[[0, 1, 0], [1, 0, 1], [0, 0, 1], [1, 0, 0]],
    found=[[0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]],
    forms=["who", "when", "where", "who"],
  )
  assert selection.is_read(some).tolist() == [True, False, True, True]
  for split in chains.SPLITS:
    folder = tmp_path / "forced" / split
    folder.mkdir(parents=True)
    aj.records.write(folder / "episodes.jsonl", _episodes(some, split))
  told = f"--chains={tmp_path / 'forced'}", f"--output={tmp_path / 'read'}"
  assert commands.run(selection, *told) == ""
  kept = chains.read(str(tmp_path / "read" / "forced"))["test"]
  assert kept.ids == ("q000", "q002", "q003")
  np.testing.assert_array_equal(kept.right, some.right[[0, 2, 3]])
  lines = (tmp_path / "read/questions/memory_train.jsonl").read_text()
  asked = [json.loads(line)["id"] for line in lines.splitlines()]
  assert asked == ["q000", "q002", "q003"]


def _measured(p, q=(0.6,), read=1.0, kept=1.0, lucky=0.0):
  return chains.Measured(100, 1.0, p, q, read, kept, lucky)


class TestPredictions:
  config = configuration.get_config()

  def test_accuracy_by_the_chain_rule(self):
    m = _measured(0.4, (0.5, 0.5), read=0.8, kept=0.9, lucky=0.1)
    by_hand = 0.5 * 0.8 + 0.25 * 0.8 + 0.25 * (0.4 * 0.9 + 0.6 * 0.1)
    assert predictions.accuracy(m, 2, searches=True) == pytest.approx(by_hand)
    assert predictions.accuracy(m, 9, searches=True) == pytest.approx(by_hand)
    assert predictions.accuracy(m, 2, searches=False) == 0.4
    assert sum(o.chance for o in predictions.outcomes(m, 2)) == pytest.approx(1)

  @pytest.mark.parametrize("p", [0.1, 0.37, 0.38, 0.9])
  @pytest.mark.parametrize("budget", [1, 4])
  def test_the_groups_deviation_weighs_answers_as_searches(self, p, budget):
    # |A| summed over the m searches is sqrt(m (G - m)) in either case.
    count = self.config.group
    scale = np.mean(
      [
        (sum(draw) * (count - sum(draw))) ** 0.5
        for draw in itertools.product((0, 1), repeat=count)
      ]
    )
    some = predictions.outcomes(_measured(p), budget)
    found = predictions.force(self.config, some, budget)
    by_hand = scale * (0.6 * (1 - p) - p)
    assert found == pytest.approx(by_hand, rel=1e-4, abs=1e-5)
    assert (found > 0) == (p < 0.6 / 1.6)

  @pytest.mark.parametrize("budget", [1, 3, 8])
  def test_a_price_has_the_switch_point_of_the_page(self, budget):
    gamma, alpha = 0.1, self.config.reward.alpha
    gain = 0.6 * (alpha + gamma * (budget - 1) / budget)
    switch = gain / (gain + gamma / budget)
    config = aj.config.changed(self.config, **rows.CHANGES["priced"])
    for p, sign in ((switch - 0.01, 1), (switch + 0.01, -1)):
      some = predictions.outcomes(_measured(p), budget)
      assert np.sign(predictions.force(config, some, budget)) == sign

  # docs/objective.md, groups of five and searches that always find.
  @pytest.mark.parametrize(
    ("budget", "switch"), [(1, 0.62), (3, 0.67), (8, 0.68)]
  )
  def test_anysearch_with_the_rollouts_deviation(self, budget, switch):
    config = aj.config.changed(
      self.config, group=5, **rows.CHANGES["batch_anysearch"]
    )
    for p, sign in ((switch - 0.03, 1), (switch + 0.03, -1)):
      some = predictions.outcomes(_measured(p, (1.0,)), budget)
      assert np.sign(predictions.force(config, some, budget)) == sign

  def test_losses_of_a_table_by_hand(self):
    gates = {
      split: {form: _measured(p) for form, p in memories.RELIABILITY.items()}
      for split in chains.SPLITS
    }
    made = predictions.predict(self.config, gates, (1, 2, 3))
    losses = [made["losses"][form] for form in ("who", "when", "where")]
    assert losses == pytest.approx([0, 0.6 * 0.5, 0.6 * 0.2])
    assert made["contrast"] == pytest.approx(0.21)
    assert all(made["rows"]["anysearch"]["who"]["searches"])
    for name in ("no_tool", "batch_no_tool"):
      right = [cell["accuracy"] for cell in made["rows"][name].values()]
      assert right == pytest.approx([0.68, 0.8, 0.92])
    assert not predictions.broken_gates(gates, made["contrast"])

  def test_who_reads_badly_should_not_search(self):
    # Of .5, a search finds .6 and reads a fifth: .12 right instead of .3.
    m = _measured(0.5, read=0.2)
    config = aj.config.changed(self.config, **rows.CHANGES["batch_no_tool"])
    assert predictions.force(config, predictions.outcomes(m, 1), 1) < 0
    gates = {
      split: dict.fromkeys(memories.RELIABILITY, m) for split in chains.SPLITS
    }
    broken = predictions.broken_gates(gates, 0.0)
    assert len(broken) == 2 * 2 + 1  # Only .5 is remembered as it should.
    assert "found a predicted contrast of 0.000" in broken[-1]


def test_rows_are_configurations_of_the_product():
  base = configuration.get_config("gpu")
  aj.validate(base)
  assert base.questions * base.group == 256
  # No row has another price of searches than its own.
  assert base.reward.length_limit >= base.episode.max_generated
  priced = aj.config.changed(base, **rows.CHANGES["priced"])
  assert priced == objectives.priced(base)
  made = rows.rows(base)
  assert len(made) == 10
  for row in made[:5]:
    config = base
    for override in row.overrides:
      path, _, text = override.partition("=")
      group, name = path.split(".")
      hint = type(getattr(getattr(config, group), name))
      value = aj.settings.literal(hint, text)
      config = aj.config.changed(config, **{group: {name: value}})
    assert config == aj.config.changed(base, **rows.CHANGES[row.name])
  assert study.STUDIES["memory"] is rows


def _world(count=300, seed=0):
  """Returns chains whose states are the form, and that find with .6."""
  rng = np.random.default_rng(seed)
  forms = [[*memories.RELIABILITY][i % 3] for i in range(count)]
  rho = np.array([memories.RELIABILITY[form] for form in forms])
  remembers = rng.random(count) < rho
  finds = rng.random(count) < 0.6
  right = np.stack([remembers, remembers | finds, remembers | finds], 1)
  found = np.stack([np.zeros(count, bool), finds, finds], 1)
  some = _chains(right, found, forms)
  states = np.zeros((count, 2, 6), np.float32)
  columns = np.array([[*memories.RELIABILITY].index(form) for form in forms])
  states[np.arange(count), 0, columns] = 1
  # After a search, it is seen whether it found.
  states[np.arange(count), 1, columns] = 1
  states[np.arange(count), 1, 3 + finds] = 1
  return some, states


class TestDecisions:
  def test_weights_are_the_librarys(self):
    decides = np.random.default_rng(0).random((3, 4, 5)) < 0.5
    decides[..., 0] = True
    for reduction in ("sequence-mean", "token-mean"):
      wanted = aj.grpo.token_weights(
        [*decides.reshape(-1, 5)], reduction=reduction
      )
      made = decisions.decision_weights(jnp.asarray(decides), reduction)
      np.testing.assert_allclose(made.reshape(-1, 5), wanted, rtol=1e-6)

  def test_a_trajectory_stops_where_it_answers_or_has_to(self):
    uniform = jnp.array([[[0.1, 0.9, 0.1], [0.1, 0.1, 0.1]]])
    for budget, limit, stops, count in (
      (5, 3, [1, 3], [2, 3]),
      (2, 3, [1, 2], [2, 2]),
      (5, 1, [1, 1], [1, 1]),
      (5, 0, [0, 0], [0, 0]),
    ):
      played = decisions.play(
        jnp.zeros((1, 3)), jnp.array([budget]), jnp.array([limit]), uniform
      )
      assert played.stops.tolist() == [stops]
      assert played.decides.sum(-1).tolist() == [count]

  def test_a_step_raises_the_decision_that_was_better(self):
    # Two trajectories: the one that searched was right, or the other.
    head = {
      "states": jnp.zeros(2),
      "budget": jnp.zeros(3),
      "bias": jnp.zeros(()),
    }
    states, budgets = jnp.ones((1, 1, 2)), jnp.array([1])
    uniform = jnp.array([[[0.0], [1.0]]])
    played = decisions.play(jnp.zeros((1, 1)), budgets, jnp.array([1]), uniform)
    config = configuration.get_config()
    some, _ = _world(3)
    for right, sign in (([0, 1], 1), ([1, 0], -1)):
      one = _chains([right], [[0, 0]], ["who"])
      both, _ = decisions.caches(
        {"train": one, "test": one},
        {"train": np.ones((1, 1, 2)), "test": np.ones((1, 1, 2))},
        np.zeros(2),
      )
      advantages, em = decisions.rollout_advantages(
        both["train"], jnp.array([0]), budgets, played.stops, config
      )
      assert em.tolist() == [[right[1], right[0]]]
      gradient = jax.grad(decisions.loss)(
        head,
        states,
        budgets,
        played,
        advantages,
        behaviour=head,
        reference=head,
        objective=config.objective,
      )
      after = optax.apply_updates(
        head, jax.tree.map(lambda x: -0.1 * x, gradient)
      )
      odds = decisions.log_odds(after, states, budgets)
      assert np.sign(odds[0, 0]) == sign
    # By hand: each |A| is 1, two trajectories, d log p / d bias = 1/2.
    assert abs(float(gradient["bias"])) == pytest.approx(0.5, rel=1e-4)

  def test_head_before_training_decides_as_the_policy(self):
    some, states = _world(30)
    own = np.linspace(-1, 1, 6)
    both, start = decisions.caches(
      {"train": some, "test": some}, {"train": states, "test": states}, own
    )
    odds = decisions.log_odds(start, both["test"].states, jnp.full(30, 3))
    np.testing.assert_allclose(odds, states @ own, atol=1e-5)

  def test_chains_without_a_search_are_refused(self):
    some, states = _world(3)
    some = dataclasses.replace(some, searches=np.zeros((3, 3), int))
    both = {"train": some, "test": some}
    with pytest.raises(ValueError, match="found no chain that searches"):
      decisions.caches(both, {"train": states, "test": states}, np.zeros(6))

  def test_rows_learn_what_is_predicted(self):
    some, states = _world()
    both, start = decisions.caches(
      {"train": some, "test": some},
      {"train": states, "test": states},
      np.zeros(6),
    )
    base = aj.config.changed(
      configuration.get_config(),
      curriculum={"total_steps": 150, "phase1_steps": 0, "max_budget": 2},
      optimizer={"learning_rate": 0.05},
    )
    searched = {}
    for name in ("anysearch", "batch_no_tool"):
      config = aj.config.changed(base, **rows.CHANGES[name])
      heads = decisions.train(both["train"], start, config, [0, 1])
      assert heads["bias"].shape == (2,)
      assert float(heads["bias"][0]) != float(heads["bias"][1])
      one = decisions.outcomes(
        both["test"],
        some,
        jax.tree.map(lambda x: x[0], heads),
        row=name,
        seed=0,
        settings="",
        greedy=True,
      )
      assert one.right.shape == (6, 300)
      searched[name] = chains.by_form(some, (one.searches[0] > 0) * 1.0)
    assert searched["anysearch"] == {"who": 1, "when": 0, "where": 0}
    assert searched["batch_no_tool"] == {"who": 1, "when": 1, "where": 1}


def _row(ids, name, seed, right, searches):
  return outcomes.Outcomes(
    *(name, seed, "", outcomes.digest(ids), (1,) * len(ids)),
    *(configuration.BUDGETS, right, searches),
  )


def _trained(some, seeds=4):
  """Returns outcomes in which AnySearch loses .3 of `when` and `where`."""
  count = len(some.ids)
  rng = np.random.default_rng(3)
  made = []
  for seed, name in itertools.product(range(seeds), rows.CHANGES):
    chance = np.full(count, 0.8)
    if name == "anysearch":
      chance -= 0.3 * (np.array(some.forms) != "who")
    right = rng.random((6, count)) < chance
    searches = np.full((6, count), 1 + (name != "anysearch"))
    for ending in ("", rows.GREEDY):
      made.append(_row(some.ids, name + ending, seed, right, searches))
  return made


class TestResults:
  def test_numbers_are_differences_of_means(self):
    some, _ = _world(90)
    found = results.by_row(_trained(some), some, greedy=False)
    assert {*found} == {*rows.CHANGES}
    numbers = results.losses(found, some.forms, "batch_no_tool", "anysearch")

    def mean(name, mask, budgets=slice(None)):
      return np.mean([o.right[budgets][:, mask] for o in found[name]])

    forms = np.array(some.forms)
    masks = [forms == form for form in memories.RELIABILITY]
    masks.append(forms != "")
    by_hand = [
      mean("batch_no_tool", mask) - mean("anysearch", mask) for mask in masks
    ]
    np.testing.assert_allclose(numbers.value[:4], by_hand, atol=1e-12)
    unseen = slice(4, 6)  # Budgets 5 and 6.
    gap = mean("batch_no_tool", masks[3], unseen)
    gap -= mean("anysearch", masks[3], unseen)
    np.testing.assert_allclose(numbers.value[4:], [gap, 1], atol=1e-12)
    assert len(numbers.runs) == 8  # Trainings of two rows are not paired.
    primary, *others = results.decided(numbers)
    contrast = (by_hand[1] + by_hand[2]) / 2 - by_hand[0]
    assert primary[1].estimate.value == pytest.approx(contrast)
    assert primary[1].estimate.low > 0.1
    raw = [effect.p for _, effect, _ in (primary, *others)]
    adjusted = [p for _, _, p in (primary, *others)]
    np.testing.assert_allclose(adjusted, aj.inference.holm(raw))
    assert max(raw) <= max(adjusted) < 0.05

  def test_answers_to_other_questions_are_refused(self):
    some, _ = _world(90)
    other = dataclasses.replace(some, ids=tuple(f"x{i}" for i in some.ids))
    with pytest.raises(ValueError, match="other questions"):
      results.by_row(_trained(some), other, greedy=False)
    with pytest.raises(ValueError, match="found no training of batch_no_tool"):
      results.by_row([], some, greedy=True)


def _episodes(some, split):
  """Returns episodes of forced depth, as `anysearch evaluate` writes them."""
  opened, search = [90], [91]
  for n, id_ in enumerate(some.ids):
    for depth in range(some.depth + 1):
      ids, authors, observations = [1, 2, 3 + n % 50], [["prompt", 3]], []
      for k in range(depth):
        is_found = some.found[n, k + 1] and not some.found[n, k]
        text = "gold" if is_found else "nothing"
        passages = [{"id": "1", "title": "", "text": text}]
        observations.append({"tool": "search", "turn": k, "passages": passages})
        ids += [*opened, *search, 5, 6]
        authors += [["model", 2], ["environment", 2]]
      ids += [*opened, 92]
      authors.append(["model", 2])
      yield {
        "question_id": id_,
        "question": _QUESTIONS[some.forms[n]].format(n),
        "golden_answers": ["gold"],
        "seed": depth,
        "failed": False,
        "em": int(some.right[n, depth]),
        "format": 1,
        "searches": depth,
        "generated_tokens": 20,
        "observations": observations,
        "tokens": {"ids": ids, "authors": authors},
        "metadata": {"split": split},
      }


class TestHidden:
  def test_states_are_those_before_the_decisions(self):
    policy = aj.load_policy("configs/graded_world_policy")
    some, _ = _world(4)
    deepest = [row for row in _episodes(some, "test") if row["seed"] == 2]
    own = [hidden.decisions(row, [90]) for row in deepest]
    assert own[0].places == [3, 7]
    made = hidden.states(policy, own, depth=3, dtype="float32")
    assert made.shape == (4, 3, policy.architecture.d_model)
    assert not made[:, 2].any()
    for row, states in zip(deepest, made, strict=True):
      tokens = jnp.array([row["tokens"]["ids"][:8]])
      whole = aj.decoder.forward(
        policy.params,
        policy.architecture,
        tokens,
        jnp.arange(8)[None],
        jnp.ones_like(tokens),
      )
      np.testing.assert_allclose(states[0], whole[0, 3], atol=1e-4)
      np.testing.assert_allclose(states[1], whole[0, 7], atol=1e-4)

  def test_other_episodes_are_refused(self):
    some, _ = _world(1)
    row = [*_episodes(some, "test")][-1]
    with pytest.raises(ValueError, match="found a turn without <think>"):
      hidden.decisions(row, [89])


def test_all_stages_from_episodes_to_a_figure(tmp_path):
  depth = 2
  for split, seed in (("train", 0), ("test", 1)):
    some, states = _world(60, seed)
    folder = tmp_path / "forced" / split
    folder.mkdir(parents=True)
    aj.records.write(folder / "episodes.jsonl", _episodes(some, split))
    read = chains.Chains.of(aj.read_episodes(folder / "episodes.jsonl"))
    for name in ("right", "found", "searches"):
      np.testing.assert_array_equal(getattr(read, name), getattr(some, name))
    assert (read.forms, read.depth) == (some.forms, depth)
    (tmp_path / "hidden").mkdir(exist_ok=True)
    path = tmp_path / "hidden" / f"{split}-00000.npz"
    hidden._save(path, ids=np.array(some.ids), states=states)
  hidden._save(tmp_path / "hidden" / "head.npz", head=np.zeros(6))
  told = f"--predictions={tmp_path / 'predictions.json'}"
  read_from = f"--chains={tmp_path / 'forced'}"
  trained = [
    *(read_from, f"--hidden={tmp_path / 'hidden'}", told, "--seeds=3"),
    *(f"--output={tmp_path / 'made'}", "--rollouts=20"),
  ]
  assert "before any training" in commands.run(decisions, *trained)
  output = f"--output={tmp_path / 'predictions.json'}"
  broken = commands.run(predictions, read_from, output)
  assert "train longer on the closed book" in broken
  assert not (tmp_path / "predictions.json").exists()
  assert commands.run(predictions, read_from, output, "--allow_gates") == ""
  assert commands.run(decisions, *trained) == ""
  found = outcomes.read(tmp_path / "made" / "outcomes.jsonl")
  assert len(found) == 3 * 10
  ended, printed = commands.printed(decisions, *trained)
  assert not ended and "anysearch, 0 seeds" in printed
  changed = [*trained[:-1], "--rollouts=30"]
  assert "other settings" in commands.run(decisions, *changed)
  stored = f"--outcomes={tmp_path / 'made' / 'outcomes.jsonl'}"
  made = f"--output={tmp_path / 'made'}"
  assert commands.run(results, read_from, told, stored, made) == ""
  page = (tmp_path / "made" / "results.md").read_text()
  assert "| primary contrast |" in page
  assert "| best decisions |" in page
  assert "</svg>" in (tmp_path / "made" / "losses.svg").read_text()
  # Predictions are not changed afterwards.
  (tmp_path / "predictions.json").write_text("{}")
  ended = commands.run(predictions, read_from, output, "--allow_gates")
  assert "other predictions" in ended
