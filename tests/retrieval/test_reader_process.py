"""Files that take too much time or memory, or end their reader."""

from __future__ import annotations

import json
import os
import stat
import sys
import time

import docx
import pytest
import source_tree

from anysearch_jax.launch import documents as launch_documents
from anysearch_jax.retrieval.documents import finding, folder, reader_process
from anysearch_jax.retrieval.index import building, opening

SETTINGS = reader_process.Settings(tokens=100, overlap=10)
PNG = b"\x89PNG\r\n\x1a\n"


def read(paths, **settings):
  with reader_process.Readers(SETTINGS._replace(**settings)) as readers:
    return list(readers.read_all(map(str, paths)))


def notes(place, count):
  paths = [place / f"{number}.txt" for number in range(count)]
  for number, path in enumerate(paths):
    path.write_text(f"Note number {number}.")
  return paths


@pytest.mark.parametrize(
  ("command", "reason"),
  [
    ("sh -c 'sleep 60'", "takes more than 1 seconds to read"),
    ("sh -c 'kill -SEGV $PPID'", "ends its reader (code -11)"),
    (
      "sh -c 'kill -KILL $PPID'",
      "needs more than 1024 MB of memory, or its reader was stopped",
    ),
  ],
)
def test_a_file_that_ends_its_reader_costs_itself(tmp_path, command, reason):
  paths = notes(tmp_path, 40)
  for place in (0, 17, 41):
    picture = tmp_path / f"{place}.png"
    picture.write_bytes(PNG)
    paths.insert(place, picture)
  texts = read(paths, ocr=command, max_seconds=1)
  for path, text in zip(paths, texts, strict=True):
    if path.suffix == ".png":
      assert text == ((), reason)
    else:
      (passage,) = text.passages
      assert passage.text == f"Note number {path.stem}." and not text.reason


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such limit")
def test_a_file_that_needs_too_much_memory_costs_itself(tmp_path):
  large, small = tmp_path / "large.txt", tmp_path / "small.txt"
  large.write_text("Many words. " * 3_000_000)
  small.write_text("Few words.")
  (failed, text) = read([large, small], max_bytes=120 << 20)
  assert failed == ((), "needs more than 120 MB of memory")
  assert [passage.text for passage in text.passages] == ["Few words."]


def test_a_table_of_a_million_columns_is_read_or_named_in_time(tmp_path):
  document = docx.Document()
  document.add_paragraph("The lease ends in June.")
  table = document.add_table(2, 2)
  table.cell(0, 0).text = "rent"
  cell = table.cell(0, 0)._tc
  cell.get_or_add_tcPr().get_or_add_gridSpan().val = 30_000_000
  document.save(tmp_path / "wide.docx")
  started = time.monotonic()
  (text,) = read([tmp_path / "wide.docx"], max_seconds=20)
  assert time.monotonic() - started < 15
  assert "June" in "".join(passage.text for passage in text.passages)


def test_unchanged_files_start_no_process(tmp_path, monkeypatch):
  place = tmp_path / "notes"
  place.mkdir()
  notes(place, 3)
  folder.update(place, tmp_path / "index")
  monkeypatch.setattr(reader_process, "_start", None)
  assert folder.update(place, tmp_path / "index").unchanged == 3


def test_a_script_without_a_main_guard_indexes_documents(tmp_path):
  """Also in a folder with a module that is called like one of Python's."""
  place = tmp_path / "notes"
  place.mkdir()
  notes(place, 3)
  (tmp_path / "json.py").write_text("raise SystemExit('a stranger ran')")
  script = (
    "import sys; sys.path = [p for p in sys.path if p]\n"
    "import anysearch_jax as aj\n"
    "print(aj.index_documents(['notes'], 'index').passages)\n"
  )
  done = source_tree.python(
    *("-P", "-c", script),
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(source_tree.ROOT)},
  )
  assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_links_out_of_the_folder_are_counted_and_not_read(tmp_path):
  secret = tmp_path / "secret.txt"
  secret.write_text("The password is swordfish.")
  elsewhere = tmp_path / "elsewhere"
  elsewhere.mkdir()
  (elsewhere / "far.txt").write_text("A far file.")
  place = tmp_path / "notes"
  place.mkdir()
  notes(place, 2)
  (place / "out.txt").symlink_to(secret)
  (place / "memory.txt").symlink_to("/proc/self/mem")
  (place / "device.txt").symlink_to("/dev/zero")
  os.mkfifo(place / "pipe.txt")
  (place / "inside.txt").symlink_to(place / "0.txt")
  (place / "folder").symlink_to(elsewhere)
  (place / "circle").symlink_to(place)
  made = folder.update(place, tmp_path / "index")
  assert made.files == 2
  assert made.ignored == {
    "link out of the folder": 2,  # out.txt and memory.txt.
    "linked folder": 2,
    "no regular file": 2,
  }
  made = folder.update(
    place, tmp_path / "followed", folder.Settings(follow_links=True)
  )
  assert made.files == 4
  # What the user names is read: a link, and a folder by a link.
  named = finding.find_files(
    [str(place / "out.txt"), str(place / "folder")],
    (".txt",),
    excluded_folder=str(tmp_path / "index"),
  )
  assert [file.name for file in named.files] == ["folder/far.txt", "out.txt"]
  matched = finding.find_files(
    [str(place / "*.txt")], (".txt",), excluded_folder=str(tmp_path / "index")
  )
  assert {file.name for file in matched.files} == {"0.txt", "1.txt"}


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_an_index_is_for_its_user_alone(tmp_path, umask):
  place = tmp_path / "notes"
  place.mkdir()
  notes(place, 2)
  before = os.umask(umask)
  try:
    folder.update(place, tmp_path / "index")
  finally:
    os.umask(before)
  assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o700


def test_spellings_of_a_folder_share_an_index_whose_rows_show_each(
  tmp_path, monkeypatch
):
  """A file is read once, and its rows have the path as it is typed."""
  place = tmp_path / "home" / "notes"
  (place / "a").mkdir(parents=True)
  (place / "a/ü.txt").write_text("One line.\u2028Another lease.")
  (place / "b.md").write_text("# Lease\n\nIt ends.")
  monkeypatch.chdir(tmp_path / "home")
  index = tmp_path / "index"
  caches = set()
  read_files = []
  read_all = reader_process.Readers.read_all

  def counted(self, paths):
    listed = list(paths)
    read_files.extend(listed)
    return read_all(self, listed)

  monkeypatch.setattr(reader_process.Readers, "read_all", counted)
  for spelling in ("notes", "./notes", "notes/", f"{place}", "../home/notes"):
    caches.add(launch_documents._cache_folder([spelling]))
    summary = folder.update([spelling], index)
    hits = opening.open_index(index, verify=True).search(["lease"], 5)[0]
    prefix = spelling.rstrip("/")
    wanted = {f"{prefix}/a/ü.txt", f"{prefix}/b.md"}
    assert {hit.source.path for hit in hits} == wanted
    assert {hit.id for hit in hits} == {"a/ü.txt#1", "b.md#1"}
    assert summary.removed == summary.changed == 0
    assert folder.is_current([spelling], index, folder.Settings())
  assert len(caches) == 1
  assert read_files == ["notes/a/ü.txt", "notes/b.md"]
  monkeypatch.chdir(tmp_path)
  assert launch_documents._cache_folder(["notes"]) not in caches


def test_headers_that_need_too_much_memory_cost_their_letter_alone(tmp_path):
  paths = []
  for number, headers in enumerate(
    ("To: " + "a@b.c, " * 40_000, "Subject: " + "a" * 400_000, "Subject: hi")
  ):
    for letter in ("", "good"):
      path = tmp_path / f"{letter}{number}.eml"
      path.write_text(f"{'X: a' if letter else headers}\n\nBody {number}.\n")
      paths.append(path)
  started = time.monotonic()
  texts = read(paths)
  assert time.monotonic() - started < 30
  for number, text in enumerate(texts):
    assert f"Body {number // 2}." in text.passages[-1].text
    cut = "has a header of more than 20000 characters"
    assert text.reason == (cut if number in (0, 2) else "")
  longest = max(len(x.title) + len(x.heading) for x in texts[2].passages)
  assert longest < 2001


def test_a_file_that_filled_the_memory_leaves_none_of_it_to_the_next(
  tmp_path, monkeypatch
):
  ended = []
  end = reader_process._end
  monkeypatch.setattr(
    reader_process, "_end", lambda process: ended.append(end(process))
  )
  monkeypatch.setattr(reader_process, "_PROCESSES", 1)
  large = tmp_path / "large.txt"
  large.write_text("A word. " * (6 << 20))
  small, other = notes(tmp_path, 2)
  texts = read([small, large, other], max_bytes=100 << 20)
  assert texts[1].reason == "needs more than 100 MB of memory"
  assert [len(text.passages) for text in texts] == [1, 0, 1]
  assert ended == [0, 0]


def test_five_thousand_notes_are_read_in_seconds(tmp_path):
  paths = notes(tmp_path, 5000)
  started = time.process_time()
  children = os.times().children_user
  assert sum(len(text.passages) for text in read(paths)) == 5000
  spent = time.process_time() - started + os.times().children_user - children
  assert spent < 15, spent  # About 3 seconds on a quiet machine.


def test_the_newest_build_lists_why_files_were_not_read(tmp_path):
  (tmp_path / "notes").mkdir()
  notes(tmp_path / "notes", 1)
  (tmp_path / "notes" / "bad.pdf").write_bytes(b"%PDF-1.7 broken")
  made = folder.update(tmp_path / "notes", tmp_path / "index")
  ((path, reason),) = made.skipped
  assert path.endswith("bad.pdf") and reason
  build = building.newest_build(tmp_path / "index")
  stored = json.loads((build / "files.json").read_text())["files"]
  assert [values[-1] for values in stored] == ["", reason]


def test_an_interrupted_update_waits_for_no_file(tmp_path):
  picture = tmp_path / "slow.png"
  picture.write_bytes(PNG)
  started = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    with reader_process.Readers(
      SETTINGS._replace(ocr="sh -c 'sleep 60'", max_seconds=60)
    ) as readers:
      readers._threads.submit(readers._read, str(picture))
      time.sleep(1.0)
      raise KeyboardInterrupt
  assert time.monotonic() - started < 20


def test_headings_of_tex_without_an_end_take_linear_time(tmp_path):
  path = tmp_path / "bad.tex"
  path.write_text("\\section[" * 50_000 + " The lease ends.")
  started = time.monotonic()
  (text,) = read([path], max_seconds=20)
  assert text.passages and time.monotonic() - started < 10
