"""Trajectories: those chosen, and the browser's selection, size and texts."""

from __future__ import annotations

import json
import pathlib

import pytest
import study
import tokenizers

from anysearch_jax import types
from anysearch_jax.environment import records
from anysearch_jax.evaluation import columns as columns_lib
from anysearch_jax.report import trajectories

_TOKENIZERS = pathlib.Path("../shared/tokenizers")


def _samples(**options):
  options = {"questions": 30, "budgets": (0, 1, 5)} | options
  return [
    trajectories.Sample(
      label, study.row(label, **options).episodes, study.decode
    )
    for label in ("A", "B")
  ]


def _keys(data, row):
  return [
    (e["question_id"], e["budget"], e["seed"])
    for e in data["entries"]
    if e["row"] == row
  ]


def test_every_row_shows_the_same_episodes_of_every_budget():
  data = trajectories.browser_data(_samples(), max_entries=24)
  assert data["rows"] == ["A", "B"]
  assert len(data["entries"]) == 24
  assert _keys(data, 0) == _keys(data, 1)
  budgets = [budget for _, budget, _ in _keys(data, 0)]
  assert [budgets.count(b) for b in (0, 1, 5)] == [4, 4, 4]


def test_page_size_is_bounded_equally_for_all_rows():
  samples = _samples(questions=60)
  whole = trajectories.browser_data(samples, max_entries=300)
  small = trajectories.browser_data(samples, max_entries=300, max_bytes=40_000)
  assert len(json.dumps(small)) < 45_000 < len(json.dumps(whole))
  assert _keys(small, 0) == _keys(small, 1)
  assert _keys(small, 0) == _keys(whole, 0)[: len(_keys(small, 0))]


def test_tokens_are_those_of_the_episode():
  (sample, _) = _samples()
  data = trajectories.browser_data([sample], max_entries=30)
  episodes = {columns_lib.key_of(e): e for e in sample.episodes}
  for entry in data["entries"]:
    episode = episodes[columns_lib.key_of(entry)]
    told = entry["tokens"]
    text = "".join(data["vocabulary"][i] for i in told["texts"])
    assert text == "".join(span["text"] for span in episode["spans"])
    assert entry["prompt"] == "a prompt "
    written = sum(n for author, n in told["authors"] if author == "model")
    assert len(told["logps"]) == written
    assert told["logps"] == pytest.approx(
      episode["tokens"]["logps"], abs=0.00051
    )
    assert told["versions"] == [[3, written]]


def test_without_a_tokenizer_the_spans_are_shown():
  (sample, _) = _samples()
  blind = trajectories.Sample(sample.label, sample.episodes)
  data = trajectories.browser_data([blind], max_entries=3)
  assert data["vocabulary"] == []
  episodes = {columns_lib.key_of(e): e for e in sample.episodes}
  for entry in data["entries"]:
    assert "tokens" not in entry
    spans = episodes[columns_lib.key_of(entry)]["spans"]
    assert entry["pieces"] == [[s["author"], s["text"]] for s in spans]


def _pieces(*ids):
  """Returns the token texts of ids that are decoded as UTF-8 bytes."""
  return trajectories.token_texts(
    ids, lambda some: bytes(some).decode("utf-8", "replace")
  )


def test_a_character_over_several_tokens_belongs_to_the_last():
  euro = "€".encode()
  assert _pieces(65, *euro, 66) == ["A", "", "", "€", "B"]
  # An incomplete one is shown at the end.
  assert _pieces(65, 0xE2, 0x82)[:2] == ["A", ""]
  assert "".join(_pieces(65, 0xE2, 0x82)) == "A\ufffd"


@pytest.mark.parametrize(
  "family", ["qwen2.5", pytest.param("llama3.1", marks=pytest.mark.slow)]
)
def test_token_texts_of_real_tokenizers_concatenate_to_the_text(family):
  path = _TOKENIZERS / family / "tokenizer.json"
  if not path.is_file():
    pytest.skip(f"no tokenizer in {path.parent}; set ANYSEARCH_TOKENIZERS")
  core = tokenizers.Tokenizer.from_file(str(path))
  text = "<think> où est 東京🗼? </think>\n\n<search>Ürümqi — naïve</search>  x"
  ids = core.encode(text, add_special_tokens=False).ids
  texts = trajectories.token_texts(
    ids, lambda some: core.decode(list(some), skip_special_tokens=False)
  )
  assert len(texts) == len(ids)
  assert "".join(texts) == text


def test_places_of_passages_are_numbered_as_citations_are():
  def passage(name, **place):
    return types.Passage(name, name, "t", source=types.Source(**place))

  lease = passage("lease", path="notes/lease.pdf", page=3, heading="Term > End")
  web = passage("web")
  found = [
    types.Observation("search", "q", 0, of) for of in ((lease,), (web, lease))
  ]
  (sample, _) = _samples(questions=1, budgets=(1,))
  episode = {"observations": records.observation_values(found)}
  (entry,) = trajectories.browser_data(
    [trajectories.Sample("A", [sample.episodes[0] | episode])]
  )["entries"]
  assert entry["sources"] == [
    "lease | notes/lease.pdf | page 3 | Term > End",
    "web",
  ]
