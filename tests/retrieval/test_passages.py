"""Corpora in files: rows by their lines, or an error."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest
import retrieval_cases as cases

from anysearch_jax import types
from anysearch_jax.retrieval import passages


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_a_row_is_the_passage_of_its_line(tmp_path, name):
  source = cases.write(tmp_path / name)
  corpus = passages.prepare(source, tmp_path / "prepared")
  assert len(corpus) == 20
  assert corpus[7] == types.Passage(
    "7", '"Title 7"', "Passage number n7 is about fire."
  )
  found = list(corpus.contents(0, 20))
  assert found == [json.loads(line)["contents"] for line in cases.lines(20)]
  corpus.verify()
  for row in (-1, 20):
    with pytest.raises(IndexError, match=r"expected one in \[0, 20\)"):
      corpus[row]
  # Plain files stay where they are.
  assert (tmp_path / "prepared" / "passages.jsonl").exists() == (
    name.endswith("gz")
  )
  assert passages.Corpus(tmp_path / "prepared").sha256 == corpus.sha256


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("skip", [False, True])
def test_the_last_line_may_end_in_any_way(tmp_path, end, skip):
  source = tmp_path / "corpus.jsonl"
  source.write_bytes("\n".join(cases.lines(3)).encode() + end)
  corpus = passages.prepare(source, tmp_path / "p", skip_malformed=skip)
  assert [corpus[i].id for i in range(3)] == ["0", "1", "2"]
  corpus.verify()


MALFORMED = [
  *("", "{", "[1]", "null", '{"id": "1"}', "[" * 100_000),
  '{"id": true, "contents": "\\"T\\"\\nt"}',
  '{"id": "1", "contents": 3}',
  '{"id": "1", "contents": "no title"}',
  '{"id": "1", "contents": "\\"\\"\\ntext"}',
  '{"id": "1", "contents": "\\"T\\"\\n  "}',
  '{"id": "1", "text": 3}',
  '{"id": "1", "title": ["T"], "text": "t"}',
  '{"id": "1", "title": "T", "text": "  "}',
  '{"id": "1", "title": "T"}',
]


ROWS = {
  '{"contents": "\\"T\\"\\nt"}': types.Passage("0", '"T"', "t"),
  '{"id": "a#1", "text": "t", "path": "a.pdf", "page": 2, "heading": "H"}': (
    types.Passage("a#1", '""', "t", 0.0, types.Source("a.pdf", 2, "H"))
  ),
  '{"id": 7, "title": "Iron", "text": "Iron rusts.\\nGold"}': (
    types.Passage("7", '"Iron"', "Iron rusts.\nGold")
  ),
  '{"_id": "d#7", "title": "", "text": "Iron", "metadata": {}}': (
    types.Passage("d#7", '""', "Iron")
  ),
  '{"id": "7", "text": "Iron"}': types.Passage("7", '""', "Iron"),
  '{"id": "7", "title": null, "text": "Iron"}': (
    types.Passage("7", '""', "Iron")
  ),
  '{"id": "7", "title": "\\"A\\nB\\"", "text": "C \\ud83d"}': (
    types.Passage("7", '"A B"', "C \ufffd")
  ),
  '{"id": "7", "title": "\\"Heroes\\" (song)", "text": "C"}': (
    types.Passage("7", '""Heroes" (song)"', "C")
  ),
  '{"id": "1", "contents": "\\"T \\ud83d\\"\\nx \\ud83d\\ude00 y"}': (
    types.Passage("1", '"T \ufffd"', "x \U0001f600 y")
  ),
  # Rows that have `contents` are Search-R1's.
  '{"id": "7", "contents": "\\"T\\"\\nt", "title": "A", "text": "B"}': (
    types.Passage("7", '"T"', "t")
  ),
}


@pytest.mark.parametrize("line", ROWS)
def test_rows_of_id_title_and_text_are_passages(tmp_path, line):
  (tmp_path / "corpus.jsonl").write_text(line + "\n")
  corpus = passages.prepare(tmp_path / "corpus.jsonl", tmp_path / "p")
  assert corpus[0] == ROWS[line]
  (searched,) = corpus.contents(0, 1)
  heading = ROWS[line].source.heading
  known = [t for t in (ROWS[line].title, heading) if t.strip('"')]
  assert searched == "\n".join((*known, ROWS[line].text))


@pytest.mark.parametrize("line", MALFORMED)
def test_malformed_passage_is_named_by_its_line(tmp_path, line):
  source = cases.write(tmp_path / "corpus.jsonl", extra=[line, *cases.lines(1)])
  with pytest.raises(passages.CorpusError, match="line 21: .*expected") as e:
    passages.prepare(source, tmp_path / "p")
  assert "--skip_malformed" in str(e.value)
  with pytest.raises(passages.CorpusError, match="no prepared corpus"):
    passages.Corpus(tmp_path / "p")
  corpus = passages.prepare(source, tmp_path / "p", skip_malformed=True)
  assert (len(corpus), corpus.info["skipped"]) == (21, 1)
  assert corpus[20].id == "0"
  corpus.verify()


def test_a_corpus_that_is_cut_short_or_changed_is_refused(tmp_path):
  source = cases.write(tmp_path / "corpus.jsonl")
  corpus = passages.prepare(source, tmp_path / "p")
  source.write_bytes(source.read_bytes().replace(b"n7 ", b"n8 "))
  with pytest.raises(passages.CorpusError, match="SHA-256"):
    corpus.verify()
  os.truncate(source, source.stat().st_size - 5)
  with pytest.raises(passages.CorpusError, match="is not the one that was ind"):
    passages.Corpus(tmp_path / "p")
  packed = cases.write(tmp_path / "corpus.jsonl.gz", 500)
  os.truncate(packed, packed.stat().st_size // 2)
  with pytest.raises(passages.CorpusError, match="copy it again"):
    passages.prepare(packed, tmp_path / "p")


def test_another_corpus_is_prepared_anew(tmp_path):
  source = cases.write(tmp_path / "corpus.jsonl")
  first = passages.prepare(source, tmp_path / "p").sha256
  cases.write(source, 21)
  second = passages.prepare(source, tmp_path / "p")
  assert (len(second), second.sha256 == first) == (21, False)


def test_corpus_without_passages_is_refused(tmp_path):
  (tmp_path / "corpus.jsonl").write_text("")
  with pytest.raises(passages.CorpusError, match="found no passage"):
    passages.prepare(tmp_path / "corpus.jsonl", tmp_path / "p")
  with pytest.raises(passages.CorpusError, match="found no file"):
    passages.prepare(tmp_path / "other.jsonl", tmp_path / "p")


def test_memory_does_not_grow_with_the_corpus(tmp_path):
  def peak(count):
    source = cases.write(tmp_path / f"{count}.jsonl.gz", count)
    tracemalloc.start()
    corpus = passages.prepare(source, tmp_path / str(count))
    assert corpus[count - 1].id == str(count - 1)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found

  peak(10)
  assert peak(20_000) < peak(2_000) + 1_000_000


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
@pytest.mark.parametrize("skip", [False, True])
def test_blank_lines_at_the_end_are_no_passages(tmp_path, name, skip):
  source = cases.write(tmp_path / name, 3, extra=["", " \t", ""])
  corpus = passages.prepare(source, tmp_path / "p", skip_malformed=skip)
  assert (len(corpus), corpus.info["skipped"]) == (3, 0)
  assert [corpus[i].id for i in range(3)] == ["0", "1", "2"]
  assert corpus[2].text == "Passage number n2 is about fire."
  corpus.verify()


def test_repeated_ids_are_counted(tmp_path):
  source = cases.write(tmp_path / "corpus.jsonl", extra=cases.lines(3))
  assert passages.prepare(source, tmp_path / "p").info["repeated_ids"] == 3
  source = cases.write(tmp_path / "other.jsonl")
  assert passages.prepare(source, tmp_path / "q").info["repeated_ids"] == 0


def test_a_key_that_a_row_has_twice_is_refused(tmp_path):
  source = tmp_path / "corpus.jsonl"
  source.write_text('{"id": "1", "text": "a", "id": "2"}\n')
  with pytest.raises(passages.CorpusError, match="line 1: .*'id' twice"):
    passages.prepare(source, tmp_path / "p")


def test_an_answer_holds_no_id_twice():
  first = types.Passage("7", "T", "iron", 3.0)
  other = types.Passage("7", "T", "gold", 2.0)
  third = types.Passage("7", "T", "lead", 1.0)
  found = types.distinct_passages([first, other, first, third, other])
  assert [(p.id, p.text) for p in found] == [
    ("7", "iron"),
    ("7#2", "gold"),
    ("7#3", "lead"),
  ]
