"""An index over a folder of documents follows what changes in the folder."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import threading
from concurrent import futures

import commands
import pytest
import random_encoders
import retrieval_cases as cases
import source_tree

from anysearch_jax.launch import build_index
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.documents import folder
from anysearch_jax.retrieval.encoder import encoder as encoder_lib
from anysearch_jax.retrieval.index import building, opening


def write(place: pathlib.Path, **texts: str | bytes) -> pathlib.Path:
  """Writes files, `__` for a dot and `_` for a slash, as if long ago."""
  for name, text in texts.items():
    path = place / name.replace("__", ".").replace("_", "/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    os.utime(path, (1e9, 1e9))
  return place


def first(index, query):
  """Returns the text of the best passage."""
  return index.search([query], 1)[0][0].text


LEASE = "# Lease\n\nIntro.\n\n## End\n\nThe lease ends on 31 March.\n"


@pytest.mark.parametrize("name", ["../other", "..", "", "{}/other"])
def test_an_index_opens_no_build_outside_its_folder(tmp_path, name):
  notes = write(tmp_path / "notes", lease__md=LEASE)
  folder.update(notes, tmp_path / "index")
  folder.update(notes, tmp_path / "i")
  building.newest_build(tmp_path / "i").rename(tmp_path / "other")
  current = tmp_path / "index" / building.CURRENT
  current.write_text(json.dumps({"build": name.format(tmp_path)}))
  assert building.newest_build(tmp_path / "index") == tmp_path / "index"
  with pytest.raises(ValueError, match="found no finished index"):
    opening.open_index(tmp_path / "index")


def test_only_what_changed_is_read_again_and_open_indexes_stay(tmp_path):
  notes = write(
    tmp_path / "notes", lease__md=LEASE, a_cat__txt="A cat.", dog__txt="A dog."
  )
  made = folder.update(notes, tmp_path / "index")
  assert (made.files, made.added, made.changed, made.removed) == (3, 3, 0, 0)
  build = building.newest_build(tmp_path / "index")
  same = folder.update([str(notes)], tmp_path / "index")
  assert (same.unchanged, same.added, same.changed) == (3, 0, 0)
  assert building.newest_build(tmp_path / "index") == build
  before = opening.open_index(tmp_path / "index")
  write(notes, lease__md=LEASE.replace("31 March", "30 April, today"))
  (notes / "dog.txt").unlink()
  write(notes, bird__txt="A bird.")
  made = folder.update([str(notes)], tmp_path / "index")
  assert (made.added, made.changed, made.unchanged, made.removed) == (1,) * 4
  assert "31 March" in first(before, "lease")
  after = opening.open_index(tmp_path / "index")
  assert "30 April" in first(after, "lease")
  assert first(after, "bird") == "A bird."
  assert after.search(["dog"], 1) == [()]
  (hit,) = after.search(["lease"], 1)[0]
  assert (hit.id, hit.title) == ("lease.md#1", '"Lease"')
  assert hit.source == (str(notes / "lease.md"), 0, "Lease")


def test_unchanged_passages_keep_their_vectors(tmp_path):
  """Only texts that are new reach the encoder."""
  asked: list[str] = []

  class Encoder(cases.Encoder):
    def passages(self, texts):
      asked.extend(texts)
      return super().passages(texts)

  notes = write(tmp_path / "notes", a__txt="A cat.", b__txt="A dog.")
  folder.update([str(notes)], tmp_path / "index", encoder=Encoder())
  assert sorted(asked) == ['"a.txt"\nA cat.', '"b.txt"\nA dog.']
  asked.clear()
  write(notes, b__txt="A dog, and more.")
  folder.update([str(notes)], tmp_path / "index", encoder=Encoder())
  assert asked == ['"b.txt"\nA dog, and more.']
  index = opening.open_index(tmp_path / "index", encoder=Encoder())
  for text in ('"a.txt"\nA cat.', '"b.txt"\nA dog, and more.'):
    assert f"{first(index, text)}" in text


@pytest.mark.parametrize("settings", [{"tokens": 60}, {"language": "german"}])
def test_changed_settings_make_another_index(tmp_path, settings):
  notes = write(tmp_path / "notes", a__txt="One more sentence of it. " * 40)
  made = folder.update([str(notes)], tmp_path / "index")
  other = folder.Settings(**settings)
  again = folder.update([str(notes)], tmp_path / "index", other)
  assert (again.passages > made.passages) == ("tokens" in settings)


def test_a_folder_without_text_is_refused_with_what_it_has(tmp_path):
  notes = write(tmp_path / "notes", a__png=b"1", b__txt=b"a\0b", c__md="")
  with pytest.raises(ValueError, match=r"b.txt', 'is binary.*png': 1.*\.md"):
    folder.update([str(notes)], tmp_path / "index")
  with pytest.raises(ValueError, match="found nothing at .*nope"):
    folder.update([str(tmp_path / "nope")], tmp_path / "index")


def test_an_index_above_its_documents_is_refused(tmp_path):
  (tmp_path / "a.md").write_text("Lease")
  with pytest.raises(ValueError, match="expected an index elsewhere"):
    folder.update([str(tmp_path)], tmp_path)


@pytest.mark.parametrize("name", ["files.json", "index.json", building.CURRENT])
@pytest.mark.parametrize("text", ["{}", "x", '{"files": [["a"]], "build": 3}'])
def test_a_damaged_list_of_files_is_made_anew(tmp_path, text, name):
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes/a.md").write_text("Lease")
  folder.update([str(tmp_path / "notes")], tmp_path / "index")
  build = building.newest_build(tmp_path / "index")
  at = tmp_path / "index" if name == building.CURRENT else build
  (at / name).write_text(text)
  assert folder.update([str(tmp_path / "notes")], tmp_path / "index").added


@pytest.mark.parametrize("damaged", [b"", b"x", b"x" * 99])
def test_a_damaged_corpus_is_read_again_and_loses_no_document(
  tmp_path, damaged
):
  notes = write(tmp_path / "notes", a__txt="A cat.", b__txt="A dog.")
  folder.update([str(notes)], tmp_path / "index")
  rows = building.newest_build(tmp_path / "index") / "corpus/passages.jsonl"
  rows.write_bytes(damaged.ljust(rows.stat().st_size * (len(damaged) > 1)))
  write(notes, a__txt="A cat, today.")
  folder.update([str(notes)], tmp_path / "index")
  index = opening.open_index(tmp_path / "index", verify=True)
  assert (first(index, "dog"), len(index.search(["cat"], 5)[0])) == (
    "A dog.",
    1,
  )


def test_the_command_says_what_it_read_and_what_not(tmp_path):
  notes = write(tmp_path / "n", lease__md=LEASE, x__png=b"1", b__txt=b"a\0b")
  out = f"--output={tmp_path / 'i'}"

  def said(*arguments):
    return commands.printed(build_index, out, "--cache=", *arguments)

  code, told = said(f"--documents={notes}")
  assert code == 0
  assert f"skipped {notes / 'b.txt'}: is binary, expected text\n" in told
  assert f"1 files, 1 passages in {tmp_path / 'i'} (1 added)" in told
  assert "left out: 1 .png\n" in told
  # Without --update, all is read again.
  for more, counted in (["--update"], "(as before)"), ([], "(1 added)"):
    assert counted in said(f"--documents={notes}", *more)[1]
  for wrong, sentence in (
    ([f"--corpus={notes}"], "found an index of documents"),
    ([], "found both or neither of --corpus and --documents"),
    ([f"--documents={notes}", "--kind=flat"], "expected bm25, or flat or"),
    ([f"--documents={notes}", "--passage=20"], "an overlap of 30, expected"),
  ):
    assert sentence in str(said(*wrong)[0])


@pytest.mark.parametrize("name", ["a.md", "folder", "a.json"])
def test_what_is_no_corpus_is_pointed_to_documents(tmp_path, name):
  write(tmp_path, a__md="# A", a__json='[\n{"text": "A word."}]', folder_b="b")
  with pytest.raises(passages.CorpusError, match="--documents=PATH"):
    passages.prepare(tmp_path / name, tmp_path / "p")


def test_passages_fit_the_encoder_and_longer_ones_are_counted(tmp_path):
  sizes = {"hidden_size": 32, "num_attention_heads": 4}
  random_encoders.make(tmp_path / "e", **sizes)
  encoder = encoder_lib.Encoder(tmp_path / "e", max_tokens=96)
  words = " ".join(random_encoders.words()[:300])
  notes = write(tmp_path / "n", a__txt=words)
  made = folder.update([str(notes)], tmp_path / "i", encoder=encoder)
  assert encoder.cut == 0
  assert made.passages > 300 // 48
  rows = passages.Corpus(building.newest_build(tmp_path / "i") / "corpus")
  texts = [rows[row].text for row in range(len(rows))]
  tokenizer, most = encoder.tokenizer()
  assert max(len(tokenizer.encode(text).ids) for text in texts) <= most
  encoder.passages([words, "short"])
  assert encoder.cut == 1


_KILLED = """
import os, signal, sys
sys.path.insert(0, "tests/support")
import retrieval_cases as cases
from anysearch_jax.retrieval.documents import folder
def kill(done, of):
  if done >= 1:
    os.kill(os.getpid(), signal.SIGKILL)
paths, index, when = sys.argv[1:]
folder.update([paths], index, encoder=cases.Encoder(), **{when: kill})
"""


@pytest.mark.parametrize("when", ["on_file", "on_rows"])
def test_an_update_that_is_killed_leaves_the_index(tmp_path, when):
  index, encoder = tmp_path / "i", cases.Encoder()
  notes = write(tmp_path / "n", a__txt="A cat.")
  folder.update([str(notes)], index, encoder=encoder)
  write(notes, b__txt="A dog.")
  done = source_tree.python("-c", _KILLED, notes, index, when)
  assert done.returncode == -signal.SIGKILL
  assert len(opening.open_index(index, encoder=encoder)) == 1
  assert folder.update([str(notes)], index, encoder=encoder).added == 1
  assert len(opening.open_index(index, encoder=encoder)) == 2
  assert not (index / "next").exists()


def test_updates_wait_for_each_other(tmp_path):
  notes = write(tmp_path / "n", a__txt="A cat.")
  begun, free, ended = (threading.Event() for _ in range(3))

  def hold(done, of):
    begun.set()
    assert free.wait(60)

  def second():
    folder.update([str(notes)], tmp_path / "i")
    ended.set()

  with futures.ThreadPoolExecutor(2) as threads:
    one = threads.submit(
      folder.update, [str(notes)], tmp_path / "i", on_file=hold
    )
    assert begun.wait(60)
    two = threads.submit(second)
    assert not ended.wait(0.5)
    free.set()
    one.result(60)
    two.result(60)
  assert len(opening.open_index(tmp_path / "i")) == 1


def test_the_language_of_most_passages_is_that_of_the_index(tmp_path):
  notes = write(
    tmp_path / "notes",
    a__md="Die Mietverträge der Häuser enden im Juni, und wir ziehen um.",
    b__md="Der Garten ist im Winter nicht zu betreten, weil er vereist.",
    c__md="Call the plumber.",
  )
  folder.update([str(notes)], tmp_path / "index")
  index = opening.open_index(tmp_path / "index")
  assert "Mietverträge" in first(index, "Mietvertrag Haus")
  write(notes, b__md="The garden is closed in winter for the ice that it has.")
  (notes / "a.md").unlink()
  folder.update([str(notes)], tmp_path / "index")
  index = opening.open_index(tmp_path / "index")
  assert "garden" in first(index, "gardens")


def test_words_are_found_without_their_marks_in_code_and_in_each_language(
  tmp_path,
):
  notes = write(
    tmp_path / "notes",
    a__md="We met at the café to sign it, and the plumber was there too.",
    b__py="def my_func_name(x): return the_other(x)",
    c__java="// This is the method that returns it.\nString getUserName();",
    d__md="Die Mietverträge enden im Juni, und wir ziehen aus dem Haus.",
    **{f"e{i}__md": "The lease of the house ends in June." for i in range(9)},
  )
  folder.update(notes, tmp_path / "index")
  index = opening.open_index(tmp_path / "index")
  for query, text in (
    ("cafe", "café"),
    ("func", "my_func_name"),
    ("user name", "getUserName"),
    ("getUserName", "getUserName"),
    ("getusername", "getUserName"),
    ("Mietvertrag", "Mietverträge"),
    ("Where is the cafe?", "café"),
  ):
    assert text in first(index, query), query


def test_an_index_of_an_older_analysis_is_made_again_and_says_so(
  tmp_path, monkeypatch
):
  notes = write(tmp_path / "notes", a__md="A café.")
  index = tmp_path / "index"
  with monkeypatch.context() as patch:
    patch.setattr(folder, "_VERSION", folder._VERSION - 1)
    patch.setattr(folder, "_analysis", lambda *arguments: "english")
    assert not folder.update(notes, index).is_remade
  assert opening.open_index(index).search(["cafe"], 1) == [()]
  out = f"--output={index}"
  _, told = commands.printed(
    build_index, out, "--cache=", f"--documents={notes}", "--update"
  )
  assert told.count("all files were read again: ") == 1
  assert first(opening.open_index(index), "cafe") == "A café."
  assert not folder.update(notes, index).is_remade
