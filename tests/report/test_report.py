"""The page: complete, self-contained, safe and deterministic."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import pathlib
import re

import pytest
import study
from absl import app, flags
from absl.testing import flagsaver

from anysearch_jax.evaluation import metrics
from anysearch_jax.report import build as report
from anysearch_jax.report import loading, trajectories
from launch import report as command


@pytest.fixture(scope="module")
def inputs():
  size = {"questions": 24, "budgets": (0, 1, 3, 6)}
  return (
    [
      study.row("AnySearch", run="a", **size),
      study.row("γ=0", thrift=0.8, run="b", **size),
      study.row("AnySearch + scaffold", run="a", scaffold=True, **size),
    ],
    ["γ=0"],
    [study.training("AnySearch"), study.training("γ=0", tool=0.0, seed=1)],
  )


@pytest.fixture(scope="module")
def written(inputs, tmp_path_factory):
  output = tmp_path_factory.mktemp("report") / "report.html"
  report.write(output, *inputs, notes="make it")
  return output


class _Reader(html.parser.HTMLParser):
  """Collects sections, references and open tags."""

  def __init__(self, text: str):
    super().__init__()
    self.ids, self.tags, self.references, self.stack = [], [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    self.tags.append(tag)
    self.stack += [] if tag in ("meta", "br", "input") else [tag]
    self.ids += [attrs["id"]] if "id" in attrs else []
    self.references += [
      attrs[k] for k in ("src", "href", "xlink:href") if k in attrs
    ]

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    self.handle_endtag(tag)

  def handle_endtag(self, tag):
    assert self.stack.pop() == tag


def test_the_page_is_complete(written):
  read = _Reader(written.read_text("utf-8"))
  assert read.stack == []
  assert len(read.ids) == len(set(read.ids))
  assert {
    "results", "curves", "paper", "price", "targets", "pairs", "use",
    "knowledge", "hops", "trajectories", "browser", "training", "costs",
    "making",
  } <= set(read.ids)  # fmt: skip
  # 4 against the budget, 2 against a price, the budget use of 3 rows, 1 of
  # checks, 1 by hops, the sampling of 2 runs, 7 logged histories.
  assert read.tags.count("svg") == 4 + 2 + 3 + 1 + 1 + 2 + 7


def test_page_shows_searches_of_remembered_facts(tmp_path):
  """A cell for each reliability and budget, as a figure and as a table."""
  row = study.row("AnySearch", questions=24, budgets=(0, 1, 3, 6), thrift=0.5)
  for i, episode in enumerate(row.episodes):
    right = (0.5, 1.0)[i // 4 % 2]
    for fact in episode["metadata"]["facts"]:
      fact["reliability"] = right
  output = tmp_path / "report.html"
  data = report.write(output, [row])
  lines = data["tables"]["memory_use"]["lines"]
  assert [line["keys"] for line in lines] == [
    ("AnySearch", "0.5"),
    ("AnySearch", "1"),
  ]
  assert [len(line["cells"]) for line in lines] == [3, 3]
  text = output.read_text("utf-8")
  assert "memory is right" in text and "Remembered, but searched" in text


def test_page_is_self_contained(written):
  text = written.read_text("utf-8")
  read = _Reader(text)
  assert all(r.startswith("#") and r[1:] in read.ids for r in read.references)
  assert not {"link", "iframe", "img"} & set(read.tags)
  assert read.tags.count("script") == 2  # The browser and its data.
  for outside in ("http:", "https:", "@import", "url(h", "url(//"):
    assert outside not in text
  assert str(pathlib.Path.home()) not in text


def test_the_pages_policy_allows_its_own_script_and_style_only(written):
  text = written.read_text("utf-8")
  (policy,) = re.findall(
    r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text
  )
  rules = dict(rule.split(" ", 1) for rule in html.unescape(policy).split("; "))
  assert rules["default-src"] == "'none'"
  assert text.index("Content-Security-Policy") < text.index("<style")
  for element, rule in (("script", "script-src"), ("style", "style-src-elem")):
    # Data between script tags is not executed and needs no permission.
    (own,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert rules[rule] == f"'sha256-{digest}'"
  # A style sheet inside a figure would have to be in the policy, too.
  assert text.count("<style") == 1
  assert not re.search(r"\son[a-z]+=", re.sub(r">[^<]*<", "><", text))


def test_figures_follow_the_theme(written):
  text = written.read_text("utf-8")
  for placeholder in ("#010101", "#020202", "#030303", "#0400", "#0500"):
    assert placeholder not in text
  assert "var(--series-2)" in text
  assert text.count('role="img"') == _Reader(text).tags.count("svg")
  assert "never trained" in text


def test_equal_inputs_give_equal_bytes(inputs, written, tmp_path):
  rows, controls, training = inputs
  shuffled = [
    metrics.Row(r.label, tuple(reversed(r.episodes)), r.run) for r in rows
  ]
  for again in (rows, shuffled):
    output = tmp_path / "report.html"
    report.write(
      output,
      again,
      controls,
      training,
      notes="make it",
    )
    assert output.read_bytes() == written.read_bytes()
    numbers = output.with_name("report.json").read_bytes()
    assert numbers == written.with_name("report.json").read_bytes()


def test_hostile_text_stays_text(tmp_path):
  hostile = study.HOSTILE
  base = study.row("x", questions=2, budgets=(0, 1, 8))
  episodes = tuple(
    e
    | {
      "question": hostile,
      "golden_answers": [hostile],
      "answer": hostile,
      "reason": hostile,
      "spans": [{"author": "environment", "text": hostile}],
      "dataset": hostile,
    }
    for e in base.episodes
  )
  rows = [metrics.Row(hostile, episodes), metrics.Row(f"b{hostile}", episodes)]
  training = [
    metrics.Training(
      hostile,
      study.training("x").records,
      {"a": {hostile: hostile}},
    ),
    metrics.Training("plain", (), {"a": {}}),
  ]
  output = tmp_path / "r.html"
  report.write(
    output, rows, [f"b{hostile}"], training,
    samples=[trajectories.Sample(hostile, episodes, lambda ids: hostile)],
    groups={f"b{hostile}": hostile},
    title=hostile, notes=hostile,
  )  # fmt: skip
  text = output.read_bytes().decode("utf-8")
  read = _Reader(text)
  assert "img" not in read.tags
  assert read.tags.count("script") == 2
  assert read.stack == []
  assert "&lt;script&gt;alert(" in text
  assert "{{ 7*7 }}" in text
  assert "<" not in output.with_name("tables.md").read_text("utf-8")


def test_numbers_are_written_next_to_the_page(inputs, written):
  data = json.loads(written.with_name("report.json").read_text("utf-8"))
  row = inputs[0][0]
  cell = metrics.by_budget(row.episodes)[3]
  found = data["rows"][0]["cells"]["3"]
  assert found["accuracy"] == pytest.approx(cell.accuracy)
  assert found["tp_interval"][0] < cell.tp < found["tp_interval"][1]
  assert data["rows"][0]["cells"]["0"]["tp"] is None
  assert data["budgets"] == [0, 1, 3, 6]
  assert data["trained_budget"] == 5
  assert data["datasets"] == ["world"]
  assert data["verdicts"][0]["claim"].startswith("Searching pays")
  assert data["configuration"] == {
    "labels": ["AnySearch", "γ=0"],
    "lines": [{"key": "reward.gamma_max", "values": ["0.3", "0.0"]}],
  }


def test_summary_table_by_hand():
  cell = {
    "accuracy": 0.5,
    "accuracy_interval": [0.45, 0.55],
    "searches": 1.25,
    "tp": 0.4,
  }
  none = cell | {"searches": 0.0, "tp": None}
  data = {
    "budgets": [0, 2],
    "rows": [{"label": "A", "cells": {"0": none, "2": cell}, "average": cell}],
  }
  assert report.summary_table(data).splitlines() == [
    "                  B=0       B=2      mean",
    "A",
    "  accuracy   50.0±5.0  50.0±5.0  50.0±5.0",
    "  searches       0.00      1.25      1.25",
    "  TP                -      0.40      0.40",
  ]


@pytest.mark.parametrize(
  ("rows", "options", "sentence"),
  [
    ([], {}, "no row"),
    (["a", "a"], {}, "two rows of one label"),
    (["a"], {"controls": ["a"]}, "Control 'a'"),
    (["a"], {"groups": {"b": "tool"}}, "Table 'tool' names 'b'"),
  ],
)
def test_build_errors_have_messages(rows, options, sentence):
  rows = [study.row(label, questions=1, budgets=(1,)) for label in rows]
  with pytest.raises(ValueError, match=sentence):
    report.build(rows, **options)


def test_metrics_may_lack_keys_and_hold_nan(tmp_path):
  row = study.row("a", questions=2, budgets=(1,))
  run = metrics.Training(
    "b", ({"rollout": 0}, {"rollout": 1, "loss/kl": float("nan")})
  )
  output = tmp_path / "report.html"
  report.write(output, [row], training=[run])
  assert "hold no counts of the budgets" in output.read_text("utf-8")


def test_the_command_reads_folders(inputs, tmp_path, capsys):
  rows, controls, training = inputs
  for name, row, run in zip("ab", rows, training):
    study.save_training(run, tmp_path / name)
    study.save_row(row, tmp_path / name / "evaluation" / "plain")
  paths = {
    label: tmp_path / name / "evaluation" / "plain"
    for name, label in zip("ab", ("AnySearch", "γ=0"))
  }
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(
    rows=[f"{label}={path}" for label, path in paths.items()],
    controls=controls,
    training=[f"AnySearch={tmp_path / 'a'}", f"γ=0={tmp_path / 'b'}"],
    output=str(tmp_path / "out" / "report.html"),
  ):
    command.main(["report"])
  printed = capsys.readouterr().out
  assert "γ=0" in printed
  assert printed.strip().endswith("report.html")
  assert (tmp_path / "out" / "report.json").is_file()


@pytest.mark.parametrize(
  ("items", "sentence"),
  [
    (["A=nowhere"], "A=nowhere: found no such folder; expected label=folder"),
    (["A"], "A: found no such folder; expected label=folder"),
    (["A=."], "Row 'A': found no episodes.jsonl"),
    ([], "Found no row; name the folder"),
  ],
)
def test_command_errors_have_messages(items, sentence):
  flags.FLAGS.mark_as_parsed()
  with (
    flagsaver.flagsaver(rows=items),
    pytest.raises(app.UsageError, match=sentence),
  ):
    command.main(["report"])


def test_a_repeated_rollout_counts_once(tmp_path):
  run = study.training("a", rollouts=10)
  again = run.records[-1] | {"loss/kl": 7.0}
  study.save_training(
    metrics.Training("a", (*run.records, again), run.config), tmp_path / "a"
  )
  loaded = loading.load_training("a", tmp_path / "a")
  assert len(loaded.records) == 10
  assert loaded.records[-1]["loss/kl"] == 7.0
  with pytest.raises(ValueError, match=r"found no .*metrics\.jsonl"):
    loading.load_training("a", tmp_path / "b")
