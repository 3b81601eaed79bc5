"""A corpus gets the gold documents that it lacks, and questions their ids."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from anysearch_jax.data import formats, preparing
from anysearch_jax.retrieval import completed_corpus, passages


def _words(count, name="w"):
  return " ".join(f"{name}{i}" for i in range(count))


def _parts(*metadata, name="hotpotqa_dev"):
  """Returns a part with a question for each metadata."""
  dataset, split = name.split("_")
  entries = [
    preparing.Entry(
      id=f"{name}/{i}",
      question="who?",
      golden_answers=("x",),
      dataset=dataset,
      split=split,
      hops=None,
      metadata=json.dumps(values),
    )
    for i, values in enumerate(metadata)
  ]
  return {name: preparing.Part(entries, read=len(entries))}


def _naming(*documents, **others):
  """Returns the metadata of a question with titles and texts."""
  supporting = [{"title": title, "text": text} for title, text in documents]
  return {"supporting": supporting, **others}


def _corpus(path, *documents):
  """Writes passages whose ids are their numbers."""
  rows = [
    {"id": str(i), "contents": f'"{title}"\n{text}'}
    for i, (title, text) in enumerate(documents)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def _gold_ids(completed, name="hotpotqa_dev"):
  return [
    json.loads(entry.metadata).get("gold_doc_ids")
    for entry in completed.parts[name].entries
  ]


def _read(completed, folder):
  """Writes the completed corpus and returns its passages by id."""
  completed.write(folder)
  rows = passages.read(folder / completed.name)
  return {p.id: (p.title.strip('"'), p.text) for _, p in rows}


# The gold text has 23 words, hence 20 runs of four; 16 of them are enough.
GOLD = _words(23)


def _changed(*positions):
  words = GOLD.split()
  for position in positions:
    words[position] = "other"
  return " ".join(words)


@pytest.mark.parametrize(
  ("documents", "ids"),
  [
    ([("Emma", GOLD)], ["0"]),
    ([("EMMA", f"W0, {GOLD[3:]}.")], ["0"]),
    # The piece has the end of the article's last paragraph.
    ([("Emma", f"{_words(80, 'x')} {GOLD} {_words(9, 'y')}")], ["0"]),
    # Pieces of 12 and 11 words have 9 + 8 runs; the third adds none.
    (
      [("Emma", text) for text in (_words(12), GOLD[len(_words(12)) :], "w0")],
      ["0", "1"],
    ),
    # The fewest are named: the whole text, not its piece before it.
    ([("Emma", _words(12)), ("Emma", GOLD)], ["1"]),
    # A word in the middle is in four runs.
    ([("Emma", _changed(10))], ["0"]),
    ([("Emma", _changed(5, 15))], None),
    ([("Emma", _words(12))], None),
    ([("Emma (novel)", GOLD)], None),
    ([("Other", _words(5, "x"))], None),
  ],
)
def test_document_is_there_if_its_title_has_most_of_its_runs(
  tmp_path, documents, ids
):
  corpus = _corpus(tmp_path / "c.jsonl", *documents)
  completed = completed_corpus.complete(_parts(_naming(("Emma", GOLD))), corpus)
  counts = completed.counts["hotpotqa_dev"]
  assert counts["questions"] == counts["named"] == 1
  assert counts["in_corpus"] == (ids is not None)
  assert completed.added == counts["added"] == (ids is None)
  has_title = any(title.casefold() == "emma" for title, _ in documents)
  assert counts["added_to_title"] == (ids is None and has_title)
  ((id_, *others),) = _gold_ids(completed)
  if ids:
    assert [id_, *others] == ids and not completed.lines
  else:
    assert _read(completed, tmp_path)[id_] == ("Emma", GOLD) and not others


def test_titles_are_compared_without_spelling(tmp_path):
  corpus = _corpus(tmp_path / "c.jsonl", ("Simon & Schuster", "is a firm"))
  asked = _parts(_naming(("Simon &amp; Schuster", "Is a firm.")))
  assert completed_corpus.complete(asked, corpus).added == 0


def test_shares_are_those_of_a_search_for_each_run(tmp_path):
  draw = random.Random(0)

  def text(count):
    return " ".join(draw.choices("abcde", k=count))

  documents = [(draw.choice("TU"), text(30)) for _ in range(40)]
  corpus = _corpus(tmp_path / "c.jsonl", *documents)
  gold = {(draw.choice("TU"), text(draw.randint(1, 40))) for _ in range(300)}
  parts = _parts(*(_naming(document) for document in sorted(gold)))
  completed = completed_corpus.complete(parts, corpus)
  there = 0
  for title, words in gold:
    split = words.split()
    length = min(4, len(split))
    runs = {
      " ".join(split[i : i + length]) for i in range(len(split) - length + 1)
    }
    texts = [other for name, other in documents if name == title]
    found = sum(any(run in other for other in texts) for run in runs)
    there += 10 * found >= 8 * len(runs)
  assert completed.counts["hotpotqa_dev"]["in_corpus"] == there
  assert 50 < there < 280


def test_a_document_of_several_questions_is_added_once(tmp_path):
  corpus = _corpus(tmp_path / "c.jsonl", ("Other", "text"))
  one, version = ("Emma", GOLD), ("Emma", _changed(10))
  parts = _parts(_naming(one), _naming(one, version))
  parts |= _parts(_naming(version), name="musique_dev")
  completed = completed_corpus.complete(parts, corpus)
  assert completed.added == 1
  assert completed.counts["hotpotqa_dev"]["named"] == 2
  assert completed.counts["hotpotqa_dev"]["added"] == 2
  assert completed.counts["musique_dev"]["added"] == 1
  (first, second), (third,) = (
    _gold_ids(completed, name) for name in ("hotpotqa_dev", "musique_dev")
  )
  assert first == second == third and len(first) == 1


def test_ids_of_added_passages_are_new_and_last(tmp_path):
  asked = _parts(_naming(("Emma", GOLD)))
  corpus = _corpus(tmp_path / "c.jsonl", ("Other", "text"))
  ((id_,),) = _gold_ids(completed_corpus.complete(asked, corpus))
  taken = [{"id": name, "title": "T", "text": "x"} for name in (id_, id_ + "+")]
  corpus.write_text("\n".join(map(json.dumps, taken)))
  completed = completed_corpus.complete(asked, corpus)
  assert _gold_ids(completed) == [[id_ + "++"]]
  assert [*_read(completed, tmp_path)] == [id_, id_ + "+", id_ + "++"]


def test_completed_corpus_lacks_nothing_and_is_the_same_each_time(tmp_path):
  asked = _parts(_naming(("Emma", GOLD), ("Bath", _words(9))), _naming())
  corpus = _corpus(tmp_path / "c.jsonl", ("Other", "text"))
  completed = completed_corpus.complete(asked, corpus)
  assert completed.added == 2
  assert completed_corpus.complete(asked, corpus) == completed
  completed.write(tmp_path)
  again = completed_corpus.complete(asked, tmp_path / completed.name)
  assert again.added == 0
  assert again.counts["hotpotqa_dev"]["in_corpus"] == 2
  assert _gold_ids(again) == _gold_ids(completed)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_lines_of_the_corpus_stay_as_they_are(tmp_path, name, end):
  # Rows without an id have their number.
  data = b'{"title": "T", "text": "a"}\n{"title": "T", "text": "b"}' + end
  data = gzip.compress(data) if name.endswith(".gz") else data
  corpus = tmp_path / name
  corpus.write_bytes(data)
  asked = _parts(_naming(("T", "b"), ("Emma", GOLD)))
  completed = completed_corpus.complete(asked, corpus)
  folder = tmp_path / "out"
  folder.mkdir()
  rows = _read(completed, folder)
  ((second, id_),) = _gold_ids(completed)
  assert second == "1"
  assert rows == {"0": ("T", "a"), "1": ("T", "b"), id_: ("Emma", GOLD)}
  assert (folder / completed.name).read_bytes().startswith(data)
  assert completed.name.endswith(name[1:])


@pytest.mark.parametrize(
  ("row", "columns"),
  [
    ({"id": 7, "contents": "T\nx"}, ["id", "contents"]),
    ({"_id": "7", "title": "T", "text": "x"}, ["_id", "title", "text"]),
    ({"docid": "7", "title": "T", "text": "x"}, ["docid", "title", "text"]),
  ],
)
def test_added_passages_have_the_columns_of_the_corpus(tmp_path, row, columns):
  corpus = tmp_path / "c.jsonl"
  corpus.write_text(json.dumps(row) + "\n")
  asked = _parts(_naming((' "Heroes" \n', f"{GOLD}\n\u00e9\u2028")))
  completed = completed_corpus.complete(asked, corpus)
  assert [*json.loads(completed.lines)] == columns
  (text,) = [t for _, t in list(_read(completed, tmp_path).values())[1:]]
  assert text == f"{GOLD}\n\u00e9"


@pytest.mark.parametrize(
  ("own_ids", "expected"),
  [
    # None of the ids is one of the corpus: documents name their passages.
    (["a", "b"], ["0", "gold"]),
    ([], ["0", "gold"]),
    # One is: the row names what is there, and gets what is added.
    (["2", "b"], ["2", "gold"]),
    (["2", "0"], ["2", "0", "gold"]),
  ],
)
def test_gold_doc_ids_are_kept_and_filled(tmp_path, own_ids, expected):
  corpus = _corpus(
    tmp_path / "c.jsonl", ("Emma", GOLD), ("Other", "text"), ("Emma", GOLD)
  )
  documents = (("Emma", GOLD), ("Bath", _words(9)))
  asked = _parts(_naming(*documents, gold_doc_ids=own_ids, level="hard"))
  completed = completed_corpus.complete(asked, corpus)
  (found,) = _gold_ids(completed)
  assert [id_.partition("-")[0] for id_ in found] == expected
  (entry,) = completed.parts["hotpotqa_dev"].entries
  assert json.loads(entry.metadata)["level"] == "hard"
  assert asked["hotpotqa_dev"].entries[0].metadata != entry.metadata


def test_documents_without_a_text_are_counted(tmp_path):
  corpus = _corpus(tmp_path / "c.jsonl", ("Emma", "text"))
  titles = {"supporting": [{"title": "emma"}, {"title": "Bath"}]}
  ids = {"gold_doc_ids": ["0", "9"]}
  unnamed = _naming(("", GOLD), ("Signs", "?!"))
  parts = _parts(titles, ids, unnamed, {})
  completed = completed_corpus.complete(parts, corpus)
  assert completed.counts["hotpotqa_dev"] == {
    "questions": 3,
    "named": 6,
    "in_corpus": 2,
    "added": 0,
    "added_to_title": 0,
    "left_out": 4,
  }
  assert completed.parts == parts


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ('{"id": "0", "contents": "T"}\n', "line 1: Found contents"),
    ("", "found no passage"),
    ('{"id": "0", "text": "untitled"}\n', "no passage with a title"),
    ('{"id": "0", "title": "T", "text": "x"}\n\n\n', "blank lines at the end"),
    (None, "found no file"),
  ],
)
def test_unusable_corpora_are_refused(tmp_path, text, message):
  corpus = tmp_path / "c.jsonl"
  if text is not None:
    corpus.write_text(text)
  asked = _parts(_naming(("Emma", GOLD)))
  with pytest.raises(passages.CorpusError, match=message):
    completed_corpus.complete(asked, corpus)
  with pytest.raises(passages.CorpusError, match="found a folder"):
    completed_corpus.complete(asked, tmp_path)
  with pytest.raises(formats.DataError, match="no question with gold"):
    completed_corpus.complete(_parts({}, {"supporting": []}), corpus)


def test_malformed_lines_are_skipped_on_request(tmp_path):
  corpus = tmp_path / "c.jsonl"
  corpus.write_text('{"title": "T", "text": "x"}\nnothing\n\n')
  asked = _parts(_naming(("Emma", GOLD)))
  completed = completed_corpus.complete(asked, corpus, skip_malformed=True)
  completed.write(tmp_path)
  path = tmp_path / completed.name
  rows = [p for _, p in passages.read(path, skip_malformed=True)]
  assert [p and p.text for p in rows] == ["x", None, None, GOLD]
