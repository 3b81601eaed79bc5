"""A study's picture: one SVG file, readable on light and dark backgrounds."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import study
from absl import flags
from absl.testing import flagsaver

from anysearch_jax.report import picture
from launch import report as command

# The background colours of GitHub's light and dark themes.
GROUNDS = ("#ffffff", "#0d1117")


@pytest.fixture(scope="module")
def rows():
  size = {"questions": 12, "budgets": (0, 1, 3, 6)}
  return [
    study.row("AnySearch", **size),
    study.row("γ<0 & more", thrift=0.8, **size),
  ]


@pytest.fixture(scope="module")
def text(rows):
  return picture.svg(rows, trained=5)


def luminance(color: str) -> float:
  """Returns a colour's WCAG 2.2 relative luminance.

  https://www.w3.org/TR/WCAG22/#dfn-relative-luminance
  """
  channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  linear = [
    c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
    for c in channels
  ]
  return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, other: str) -> float:
  low, high = sorted(map(luminance, (one, other)))
  return (high + 0.05) / (low + 0.05)


def test_contrast_by_hand():
  assert contrast("#000000", "#ffffff") == pytest.approx(21)
  assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("ground", GROUNDS)
def test_every_colour_is_readable_on_white_and_on_dark(ground):
  assert contrast(picture.INK, ground) >= 4
  for color in picture.SERIES:
    assert contrast(color, ground) >= 3, color


def test_picture_is_one_valid_file_with_every_row(text):
  root = ElementTree.fromstring(text)
  assert root.tag == "{http://www.w3.org/2000/svg}svg"
  panels = root.findall("{http://www.w3.org/2000/svg}svg")
  assert [p.get("aria-label") for p in panels] == ["Accuracy", "Searches made"]
  words = "".join(root.itertext())
  for label in ("AnySearch", "γ<0 & more", "never trained", "searches = B"):
    assert label in words
  ids = [element.get("id") for element in root.iter() if element.get("id")]
  assert len(ids) == len(set(ids))


def test_picture_needs_no_page_around_it(text):
  assert "var(" not in text and "currentColor" not in text
  assert not re.search(r"#0[1-6]0[0-6]0", text)  # Placeholders of `canvas`.
  linked = re.findall(r'xlink:href="([^"]*)"', text)
  assert linked and all(f'id="{link[1:]}"' in text for link in linked)


def test_equal_rows_give_equal_bytes(rows, text):
  assert picture.svg(rows, trained=5) == text


def test_the_command_writes_the_picture_and_no_report(rows, tmp_path, capsys):
  for name, row in zip("ab", rows):
    study.save_training(study.training(row.label), tmp_path / name)
    study.save_row(row, tmp_path / name / "evaluation" / "plain")
  output = tmp_path / "images" / "picture.svg"
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(figure=str(output)):
    command.main(
      ["report", *(f"{r.label}={tmp_path / n}" for n, r in zip("ab", rows))]
    )
  assert output.read_text("utf-8") == picture.svg(rows, trained=5)
  assert capsys.readouterr().out.splitlines() == [str(output)]
  assert list(output.parent.iterdir()) == [output]
  assert not (tmp_path / "a" / "report").exists()
