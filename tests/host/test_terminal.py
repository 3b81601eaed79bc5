"""What a terminal would obey in the texts of others."""

from __future__ import annotations

import pathlib

import pytest

from anysearch_jax.host import terminal
from anysearch_jax.launch import documents
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.retrieval.documents import folder

HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\r\x9b31m\u202egnp.exe\u2066\udc80"


@pytest.mark.parametrize("keeps_lines", [False, True])
def test_escapes_and_reordering_become_visible(keeps_lines):
  shown = terminal.printable(HOSTILE + "\n\tc", keeps_lines=keeps_lines)
  assert not set(shown) & set("\x1b\x07\r\x9b\u202e\u2066\udc80")
  assert shown.count("\ufffd") == 8 + 2 * (not keeps_lines)
  assert ("\n\t" in shown) == keeps_lines
  plain = "Straße, 東京, עברית, a\u200db"
  assert terminal.printable(plain) == plain


def test_names_of_files_and_errors_reach_no_terminal_as_they_are(tmp_path):
  place = tmp_path / "notes"
  place.mkdir()
  (place / "good.txt").write_text("A note.")
  (place / "bad\x1b[2J\nskipped nothing.pdf").write_bytes(b"%PDF-1.7 broken")
  summary = folder.update(place, tmp_path / "index")
  lines = list(documents.summary_lines(summary, "index"))
  assert len(lines) == 2
  assert all(line.isprintable() for line in lines)

  def command(argv):
    raise ValueError(f"found {HOSTILE}")

  with pytest.raises(SystemExit) as ended:
    launch_flags.call_command(command, ["x"])
  assert "\x1b" not in str(ended.value)
  assert pathlib.Path(summary.skipped[0][0]).exists()  # Records keep the name.
