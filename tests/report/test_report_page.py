"""The page: its verdict, complete, self-contained, safe, deterministic."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import pathlib
import re

import point_values
import pytest
import study

from anysearch_jax.evaluation import metrics
from anysearch_jax.report import loading, trajectories
from anysearch_jax.report import study as study_lib


@pytest.fixture(scope="module")
def inputs():
  size = {"questions": 24, "budgets": (0, 1, 3, 6)}
  return (
    [
      study.row("AnySearch", **size),
      study.row("γ=0", thrift=0.8, **size),
      study.row("AnySearch + scaffold", scaffold=True, **size),
    ],
    [study.training("AnySearch"), study.training("γ=0", tool=0.0, seed=1)],
  )


@pytest.fixture(scope="module")
def written(inputs, tmp_path_factory):
  output = tmp_path_factory.mktemp("report") / "report.html"
  study.write(output, *inputs, words={"notes": "make it"})
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
    "curves", "results", "pairs", "paper", "price", "use", "training", "making",
  } <= set(read.ids)  # fmt: skip
  beside = _Reader(written.with_name("trajectories.html").read_text("utf-8"))
  assert beside.stack == [] and "browser" in beside.ids
  # 4 against the budget, 2 against a price, the
  # sampling of 2 runs, 8 logged histories.
  assert read.tags.count("svg") == 4 + 2 + 2 + 8


def test_the_page_opens_with_three_sentences_and_two_figures(written):
  text = written.read_text("utf-8")
  first = text[text.index("<body>") : text.index("<details")]
  said = json.loads(written.with_name("report.json").read_bytes())["summary"]
  paragraphs = re.findall(r"<p[^>]*>(.*?)</p>", first)
  assert paragraphs[:3] == [html.escape(sentence) for sentence in said]
  labels = re.findall(r'<svg role="img" aria-label="([^"]*)"', first)
  assert labels == ["Accuracy", "Searches made"]
  assert "<table" not in first
  for link in re.findall(r'<a href="#(\w+)"', text):
    assert f'<section id="{link}">' in text


def _verdict(trainings, *labels, **skills):
  size = {"budgets": (0, 2), "questions": 80, "seeds": (1,)}
  return study.told(
    [study.trained(a, trainings, skill=skills[a], **size) for a in labels]
  )


@pytest.mark.parametrize("trainings", [1, 3])
def test_the_summary_says_what_is_resolved_and_how_sure(trainings):
  skills = {"A": 0.9, "B": 0.0, "C": 0.9}
  data = _verdict(trainings, *"ABC", **skills)
  lines = {
    line["keys"]: line["cells"]
    for line in data["tables"]["pairwise_rows"]["lines"]
  }

  def shown(other):
    gain = lines["all", "all ≥ 1", f"A − {other}"][0]
    text = f"{gain['value']:+.3f}".replace("-", "−")
    return text, gain["high"] - gain["low"]

  (won, one), (tied, other) = shown("B"), shown("C")
  compared, found, sure = data["summary"]
  assert compared == (
    "A, B and C were asked the same 80 questions of world, each under budgets "
    "of 0 and 2 searches."
  )
  assert f"are at most {max(one, other):.2f} wide" in sure
  turned = _verdict(trainings, "B", "A", **skills)["summary"][1]
  if trainings == 1:
    assert found.startswith(f"A is not ranked against B ({won}, ")
    assert f" and C ({tied}" in found and "Holm" not in sure
    assert "fewer than three trainings are not ranked" in sure
    assert turned.startswith("B is not ranked against A (−")
    return
  assert found.startswith(f"A is more accurate than B ({won}")
  assert f"; it does not differ measurably in accuracy from C ({tied}" in found
  assert "Holm" in sure and "not ranked" not in sure
  assert turned.startswith("B is less accurate than A (−")


def test_the_summary_of_one_evaluation_or_none_is_true():
  few = study.row("A", questions=3, budgets=(0, 2))
  data = study.told([few], [study.training("A")])
  cells = [line["cells"] for line in data["tables"]["overview"]["lines"]]
  (none, two, _), (_, made, _) = cells[:2]
  assert data["summary"][:2] == (
    "A was asked 3 questions of world, each under budgets of 0 and 2 searches.",
    f"Its accuracy is {none['value']:.3f} at a budget of 0 and "
    f"{two['value']:.3f} at 2, where it makes {made['value']:.2f} searches on "
    "average.",
  )
  width = max(c["high"] - c["low"] for c in (none, two))
  assert f"at most {width:.2f} wide" in data["summary"][2]
  training = study.told([], [study.training("t")])["summary"]
  assert training[0] == (
    "t was not evaluated yet; the training of t has logged 60 rollouts."
  )


def test_page_is_self_contained(written):
  text = written.read_text("utf-8")
  read = _Reader(text)
  other = written.with_name("trajectories.html").read_text("utf-8")
  beside = _Reader(other)
  assert beside.references == ["report.html"]
  inside = {f"#{name}" for name in read.ids}
  assert set(read.references) - inside == {"trajectories.html"}
  assert not {"link", "iframe", "img"} & {*read.tags, *beside.tags}
  assert read.tags.count("script") == 1
  assert beside.tags.count("script") == 2  # The browser and its data.
  text += other
  for outside in ("http:", "https:", "@import", "url(h", "url(//"):
    assert outside not in text
  assert str(pathlib.Path.home()) not in text
  # Figures follow the theme.
  for placeholder in ("#010101", "#020202", "#030303", "#0400", "#0500"):
    assert placeholder not in text
  assert text.count('role="img"') == read.tags.count("svg")


@pytest.mark.parametrize("name", ["report.html", "trajectories.html"])
def test_the_pages_policy_allows_its_own_script_and_style_only(written, name):
  text = written.with_name(name).read_text("utf-8")
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


def test_equal_inputs_in_any_order_give_equal_bytes(inputs, written, tmp_path):
  rows, training = inputs
  again = [metrics.Row(r.label, tuple(reversed(r.episodes))) for r in rows]
  output = tmp_path / "report.html"
  study.write(output, again, training, words={"notes": "make it"})
  for name in ("report.html", "report.json", "trajectories.html"):
    same = written.with_name(name).read_bytes()
    assert output.with_name(name).read_bytes() == same


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
    study_lib.Training(
      hostile, study.training("x").records, {"a": {hostile: hostile}}
    ),
    study_lib.Training("plain", (), {"a": {}}),
  ]
  output = tmp_path / "r.html"
  study.write(
    output, rows, training,
    samples=[trajectories.Sample(hostile, episodes, lambda ids: hostile)],
    groups={f"b{hostile}": hostile}, words={"title": hostile, "notes": hostile},
  )  # fmt: skip
  for name, scripts in ("r.html", 1), ("trajectories.html", 2):
    text = output.with_name(name).read_bytes().decode("utf-8")
    read = _Reader(text)
    assert "img" not in read.tags
    assert read.tags.count("script") == scripts
    assert read.stack == []
    assert "&lt;script&gt;alert(" in text
    assert "{{ 7*7 }}" in text


def test_numbers_are_written_next_to_the_page(inputs, written):
  data = json.loads(written.with_name("report.json").read_text("utf-8"))
  cell = point_values.by_budget(inputs[0][0].episodes)[3]
  (line,) = (
    line["cells"]
    for line in data["tables"]["curves"]["lines"]
    if line["keys"] == ["world", "3", "AnySearch"]
  )
  assert line[0]["value"] == pytest.approx(cell.accuracy)
  assert line[1]["low"] < cell.tp < line[1]["high"]
  assert data["budgets"] == [0, 1, 3, 6]
  assert data["trained_budget"] == 5
  assert data["datasets"] == ["world"]
  assert data["configuration"] == {
    "labels": ["AnySearch", "γ=0"],
    "lines": [{"key": "reward.gamma_max", "values": ["0.3", "0.0"]}],
  }


@pytest.mark.parametrize(
  ("rows", "options", "sentence"),
  [
    ([], {}, "no row"),
    (["a", "a"], {}, "two rows of one label"),
    (["a"], {"groups": {"b": "tool"}}, "Table 'tool' names 'b'"),
  ],
)
def test_build_errors_have_messages(rows, options, sentence):
  rows = [study.row(label, questions=1, budgets=(1,)) for label in rows]
  with pytest.raises(ValueError, match=sentence):
    study.told(rows, **options)


def test_only_failed_episodes_are_refused():
  row = study.row("a", questions=1, budgets=(1,))
  failed = metrics.Row("a", (row.episodes[0] | {"outcome": "failed"},))
  with pytest.raises(ValueError, match="only failed episodes; expected one"):
    study.told([failed])


def test_metrics_may_lack_keys_and_hold_nan(tmp_path):
  row = study.row("a", questions=2, budgets=(1,))
  run = study_lib.Training(
    "b", ({"rollout": 0}, {"rollout": 1, "loss/kl": float("nan")})
  )
  output = tmp_path / "report.html"
  study.write(output, [row], training=[run])
  assert "hold no counts of the budgets" in output.read_text("utf-8")


def test_a_repeated_rollout_counts_once(tmp_path):
  run = study.training("a", rollouts=10)
  again = run.records[-1] | {"loss/kl": 7.0}
  study.save_training(
    study_lib.Training("a", (*run.records, again), run.config), tmp_path / "a"
  )
  loaded = loading.load_training("a", tmp_path / "a")
  assert len(loaded.records) == 10
  assert loaded.records[-1]["loss/kl"] == 7.0
  with pytest.raises(ValueError, match=r"found no .*metrics\.jsonl"):
    loading.load_training("a", tmp_path / "b")
