"""From questions and passages to a policy that imitates searches."""

from __future__ import annotations

import json
import shutil

import byte_policy
import jax
import numpy as np
import pytest
from commands import printed, run

from anysearch_jax.evaluation import journal
from anysearch_jax.launch import build_index, demonstrate, prepare_data, sft
from anysearch_jax.methods import systems
from anysearch_jax.policy import hf
from anysearch_jax.training import checkpoint, imitation

PASSAGES = [
  ("1", '"Orlan"\nThe Orlan bakery was founded by Mira Tasse in 1902.'),
  ("2", '"Mira Tasse"\nMira Tasse was a baker. She grew up in Lund.'),
  ("3", '"Bread"\nBread is made of flour.'),
]
TRAINED = [
  ("a", "Who founded the Orlan bakery?", "Mira Tasse", ["1"], 1),
  ("b", "Where did the founder of Orlan grow up?", "Lund", ["1", "2"], 2),
  ("c", "Who painted the ceiling?", "Nobody", ["3"], 1),
]
HELD_OUT = ("d", "What is bread made of?", "flour", ["3"], 1)


def _line(id_, question, answer, gold, hops):
  metadata = {"gold_doc_ids": gold, "n_hops": hops}
  row = {"id": id_, "question": question, "golden_answers": [answer]}
  return json.dumps(row | {"metadata": metadata})


@pytest.fixture(scope="module")
def work(tmp_path_factory):
  """A folder with questions, an index, a policy and its demonstrations."""
  folder = tmp_path_factory.mktemp("sft")
  lines = [json.dumps({"id": i, "contents": text}) for i, text in PASSAGES]
  corpus = folder / "corpus.jsonl"
  corpus.write_text("\n".join(lines))
  (folder / "train.jsonl").write_text("\n".join(_line(*x) for x in TRAINED))
  (folder / "test.jsonl").write_text(_line(*HELD_OUT))
  assert not run(
    prepare_data,
    f"--input=own:train={folder / 'train.jsonl'}",
    f"--input=own:test={folder / 'test.jsonl'}",
    *("--mix=own", f"--passages={corpus}"),
    f"--output={folder / 'questions'}",
  )
  index = folder / "index"
  assert not run(build_index, f"--corpus={corpus}", f"--output={index}")
  byte_policy.save(folder / "policy")
  ended, said = printed(demonstrate, *settings(folder), *output(folder))
  assert not ended, ended
  (folder / "said.txt").write_text(said)
  return folder


def settings(folder):
  return [
    "--config=configs/small.py:smollm2-cpu",
    f"--config.policy={folder / 'policy'}",
    f"--config.data.path={folder / 'questions'}",
    f"--config.retrieval.index={folder / 'index'}",
    "--config.episode.top_k=1",
    # A token is a byte here.
    *("--config.episode.max_turn=0", "--config.episode.max_generated=512"),
    "--config.evaluation.budgets=0,1,2",
  ]


def output(folder, name="demonstrations"):
  return [f"--output={folder / name}"]


def learning(folder, name, *more):
  return [
    *settings(folder),
    *output(folder, name),
    f"--demonstrations={folder / 'demonstrations'}",
    *("--config.sft.steps=6", "--config.sft.demonstrations=3"),
    *("--config.sft.learning_rate=0.02", "--config.sft.play_every=3"),
    *("--config.sft.play_questions=1", "--config.lora.rank=4"),
    *("--config.save_every=2", "--config.checkpoint.export_dtype=float32"),
    *("--config.batch.row_lengths=1152", "--config.engine.lanes=4"),
    *more,
  ]


def test_demonstrations_follow_the_evidence_within_each_budget(work):
  rows = {
    (row["question_id"], row["budget"]): row
    for row in journal.read(work / "demonstrations" / "episodes.jsonl")
  }
  searches = {key: row["searches"] for key, row in rows.items()}
  # Question c is answered from memory alone: no passage has its answer.
  assert searches == {
    **{("own/a", 0): 0, ("own/a", 1): 1, ("own/a", 2): 1},
    **{("own/b", 0): 0, ("own/b", 2): 2, ("own/c", 0): 0},
  }
  assert rows["own/b", 2]["queries"][1] == "Mira Tasse"
  assert all(row["em"] and row["format"] for row in rows.values())
  said = (work / "said.txt").read_text()
  assert "own budget 1                  1      1.00" in said
  assert "2 answer not found" in said and "(6 episodes)" in said
  summary = json.loads((work / "demonstrations" / "summary.json").read_text())
  dropped = [sum(cell["dropped"].values()) for cell in summary["cells"]]
  assert summary["played"] == summary["kept"] + sum(dropped) == 9


def test_an_episode_is_imitated_in_the_tokens_that_were_played(work):
  environment = systems.environment("compact")
  codec = byte_policy.tokenizer()
  for row in journal.read(work / "demonstrations" / "episodes.jsonl"):
    imitated = imitation.encode(row, environment=environment, codec=codec)
    assert imitated.token_ids.tolist() == row["tokens"]["ids"]
    by_model = [
      author == "model"
      for author, count in row["tokens"]["authors"]
      for _ in range(count)
    ]
    assert imitated.by_model.tolist() == by_model


def test_right_episodes_of_a_policy_are_kept_the_cheapest_first(tmp_path):
  ended, said = printed(
    *(demonstrate, "--config=configs/quickstart.py", "--source=policy"),
    *("--scripted=everything", "--budgets=0,2,8", *output(tmp_path)),
    "--config.evaluation.questions=12",
  )
  assert not ended, ended
  folder = tmp_path / "demonstrations"
  played = list(journal.read(folder / "played" / "episodes.jsonl"))
  kept = list(journal.read(folder / "episodes.jsonl"))
  assert len(played) == 36 and 12 <= len(kept) < 36
  assert all(row["em"] for row in kept)
  cheapest = {}
  for row in played:
    if row["em"]:
      id_ = row["question_id"]
      cheapest[id_] = min(cheapest.get(id_, 99), row["searches"])
  # What a lower budget answered is not searched for at a higher one.
  first = {row["question_id"]: row for row in reversed(kept)}
  assert {id_: row["searches"] for id_, row in first.items()} == cheapest
  assert "right with fewer searches at a lower budget" in said


def test_the_same_command_adds_nothing_and_other_settings_are_refused(work):
  path = work / "demonstrations" / "episodes.jsonl"
  before = path.read_bytes()
  assert not run(demonstrate, *settings(work), *output(work))
  assert path.read_bytes() == before
  said = run(
    demonstrate, *settings(work), *output(work), "--config.episode.top_k=2"
  )
  assert "episode.top_k" in said and "Name another folder" in said


def test_tags_are_needed_to_follow_evidence(work):
  said = run(
    *(demonstrate, *settings(work), *output(work, "tools")),
    "--config.episode.prompts=documents_tools",
  )
  assert "expected one with tags" in said


def test_a_policy_that_is_never_right_gives_no_demonstration(work):
  said = run(
    *(demonstrate, *settings(work), *output(work, "untrained")),
    *("--source=policy", "--config.episode.max_generated=8"),
    *("--config.engine.lanes=4", "--config.evaluation.budgets=0"),
  )
  assert "found no right and well-formed episode among 3" in said


@pytest.fixture(scope="module")
def trained(work):
  """The folder of an uninterrupted training, and what it printed."""
  ended, said = printed(sft, *learning(work, "run"))
  assert not ended, ended
  (work / "run" / "said.txt").write_text(said)
  return work / "run"


def _metrics(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_training_lowers_the_loss_and_plays_held_out_questions(trained):
  records = _metrics(trained)
  losses = [record["loss/total"] for record in records]
  assert len(losses) == 6 and losses[-1] < losses[0]
  assert all(record["grad_norm"] > 0 for record in records)
  played = [r["step"] for r in records if "play/format" in r]
  assert played == [3, 6]
  assert {"play/accuracy0", "play/searches2"} <= records[-1].keys()
  said = (trained / "said.txt").read_text()
  assert "demonstrations: 6 of " in said and "passes over them: 3.0" in said
  assert "held out: 1 questions" in said


def test_the_trained_policy_and_its_adapter_are_exported(work, trained):
  start = hf.load(work / "policy")
  end = hf.load(trained / "policy")
  assert (trained / "adapter" / "adapter_model.safetensors").is_file()
  moved = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()), start.params, end.params
  )
  assert max(jax.tree.leaves(moved)) > 1e-3
  assert checkpoint.sound(trained / "checkpoints") == 6


def test_a_stopped_training_resumes_to_the_bit(work, trained, monkeypatch):
  step = imitation.Trainer._step

  def stopping(self, number):
    if number == 2:
      self.stop()
    return step(self, number)

  with monkeypatch.context() as patch:
    patch.setattr(imitation.Trainer, "_step", stopping)
    assert run(sft, *learning(work, "stopped")) == "75"
  assert checkpoint.rollouts(work / "stopped" / "checkpoints")[-1] == 3
  assert not run(sft, *learning(work, "stopped"))
  for name in ("policy/model.safetensors", "adapter/adapter_model.safetensors"):
    assert (work / "stopped" / name).read_bytes() == (
      trained / name
    ).read_bytes()
  losses = [
    [record["loss/total"] for record in _metrics(folder)]
    for folder in (trained, work / "stopped")
  ]
  assert losses[0] == losses[1]


def test_every_weight_trains_without_adapters(work):
  assert not run(
    sft,
    *learning(work, "full", "--config.lora.rank=0"),
    "--config.sft.play_every=0",
  )
  losses = [record["loss/total"] for record in _metrics(work / "full")]
  assert losses[-1] < losses[0] - 0.5
  assert not (work / "full" / "adapter").exists()


def test_other_texts_and_demonstrated_held_out_questions_are_refused(work):
  said = run(sft, *learning(work, "x", "--config.episode.prompts=paper"))
  assert "with the texts of 'compact'" in said
  copy = work / "all"
  shutil.copytree(work / "demonstrations", copy)
  path = copy / "episodes.jsonl"
  row = json.loads(path.read_text().splitlines()[0])
  row["question"] = HELD_OUT[1]
  path.write_text(json.dumps(row) + "\n")
  said = run(sft, *learning(work, "y", f"--demonstrations={copy}"))
  assert "expected questions that are held out" in said


def test_demonstrations_that_do_not_fit_are_counted(work):
  said = run(
    sft, *learning(work, "z", "--config.episode.max_context=64", "--dry_run")
  )
  assert "found none that fits among 6" in said
  ended, said = printed(
    sft, *learning(work, "z", "--config.episode.max_context=512", "--dry_run")
  )
  assert not ended and "without" in said and "longer than 512 tokens" in said
