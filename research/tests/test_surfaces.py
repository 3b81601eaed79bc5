"""Surfaces over pairs of caps, by hand."""

from __future__ import annotations

import itertools
import json

import pytest
import study

import anysearch_jax as aj
from research import surfaces

SEARCHES, TOKENS = (1, 2, 5), (40, 80, 160)
GRID = list(itertools.product(SEARCHES, TOKENS))


def _capped(pairs, **options):
  """Returns episodes under pairs of caps, each with its `caps`."""
  return [
    episode | {"caps": {"tokens": tokens}}
    for searches, tokens in pairs
    for episode in study.row(
      f"A{tokens}", budgets=(searches,), questions=30, **options
    ).episodes
  ]


PLAYED = _capped(GRID)


def test_points_of_a_surface_are_means_over_their_episodes():
  found = surfaces.measure("A", aj.columns.as_columns(PLAYED))
  assert list(found.points) == GRID
  accuracy = {}
  for pair, part in found.points.items():
    here = [
      e
      for e in PLAYED
      if (e["budget"], e["caps"]["tokens"]) == pair and e["outcome"] != "failed"
    ]
    accuracy[pair] = sum(e["em"] for e in here) / len(here)
    assert part["accuracy"].value == pytest.approx(accuracy[pair])
    assert part["accuracy"].low < accuracy[pair] < part["accuracy"].high
    kept = [e["generated_tokens"] <= pair[1] for e in here]
    assert part["within"].value == pytest.approx(sum(kept) / len(here))
  # The area is the integral over the rectangle.
  whole = 0.0
  for b0, b1 in zip(SEARCHES, SEARCHES[1:]):
    for t0, t1 in zip(TOKENS, TOKENS[1:]):
      corners = [accuracy[b, t] for b in (b0, b1) for t in (t0, t1)]
      whole += (b1 - b0) * (t1 - t0) * sum(corners) / 4
  assert found.area.value == pytest.approx(whole / (4 * 120))
  assert found.area.low < found.area.value < found.area.high


@pytest.mark.parametrize("pairs", [[(1, 40), (2, 80)], [(1, 40), (2, 40)]])
def test_area_of_what_is_no_grid_is_undefined(pairs):
  assert (
    surfaces.measure("A", aj.columns.as_columns(_capped(pairs))).area.value
    is None
  )


def test_other_budgets_are_left_out_or_refused():
  plain = list(study.row("A", budgets=(1, 2), questions=30).episodes)
  with pytest.raises(ValueError, match="'A': found no budget with a cap"):
    surfaces.measure("A", aj.columns.as_columns(plain))
  mixed, alone = (
    surfaces.measure("A", aj.columns.as_columns(e))
    for e in (PLAYED + plain, PLAYED)
  )
  assert mixed.area == alone.area and list(mixed.points) == list(alone.points)
  timed = [e | {"caps": {"tokens": 40, "seconds": 3}} for e in PLAYED[:30]]
  with pytest.raises(ValueError, match="dollars or seconds"):
    surfaces.measure("A", aj.columns.as_columns([*timed, *PLAYED[30:]]))
  # Pairs have the order of their numbers.
  found = surfaces.measure(
    "A", aj.columns.as_columns(_capped([(2, 1000), (2, 90), (10, 90)]))
  )
  assert list(found.points) == [(2, 90), (2, 1000), (10, 90)]


def test_the_command_writes_a_table_and_a_heat_map(tmp_path, capsys):
  rows = []
  for label in "ab":
    folder = tmp_path / label
    folder.mkdir()
    lines = "".join(json.dumps(episode) + "\n" for episode in PLAYED)
    (folder / "episodes.jsonl").write_text(lines)
    rows.append(f"{label}={folder}")
  picture = tmp_path / "pairs.svg"
  surfaces.main([*rows, f"--output={picture}"])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 1 + 2 * (len(GRID) * 5 + 1)
  assert sum(",area," in line for line in lines) == 2
  assert "<svg" in picture.read_text()
