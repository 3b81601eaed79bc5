"""Compares the tables of fidelity with checkouts of the originals.

    git clone https://github.com/PeterGriffinJin/Search-R1 checkouts/search_r1
    ANYSEARCH_ORIGINALS=checkouts python -m pytest research/tests -k originals

The folder has a checkout for each system at the commit that `originals.toml`
names; `search_r1_ppo` and other systems with `checkout` there share one.
Systems without a folder are skipped. Of a row of configs/fidelity.csv,
or of that in research/methods, whose `where` begins with FILE:LINE,

* the line holds the first word of `authors`, as a number or as a text;
* nothing overrides it: if the line is a default of YAML or of `add_argument`,
  the system's `script` in originals.toml does not set that key, and if the line
  is the script's, no later one sets the key again;
* `original`, our value, follows from it by `rule`, see `RULES`.

Other places of both tables (FILE, or SYMBOL in FILE) must exist.

To add a system, name its `script` in originals.toml, cite FILE:LINE in its
rows, and add its reward to research/tests/test_original_rewards.py.
"""

from __future__ import annotations

import csv
import math
import operator
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anysearch_jax as aj
from anysearch_jax.configs import methods as configs
from research import methods
from research.methods import configs as plug_ins

_ROOT = pathlib.Path(__file__).parents[1]
_NUMBER = re.compile(
  r"(?<![\w.])[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?(?![\w])", re.I
)
_PLACE = re.compile(r"([\w./-]+\.\w+):(\d+)")
# A name and the beginning of its value, which is no argument of the script.
_SETS = re.compile(
  r"""(?:^|[\s(])\+?(-{0,2}[A-Za-z][\w.-]*)(?:=| +)(?=[^\s\\=])(?!"?\$\d)"""
)

# Returns the value of a setting, such as `curriculum.epochs`.
Recipe = Callable[[str], Any]
# From the authors' number and our recipe, our number. `reading` and `differs`
# are words: what the line says means our value, or is not our value for the
# reason in `why`.
RULES: Mapping[str, Callable[[float, Recipe], float]] = {
  "": lambda x, ours: x,
  "rollouts": lambda x, ours: x * ours("curriculum.steps_per_rollout"),
  "share of steps": lambda x, ours: int(x * ours("curriculum.total_steps")),
  # The mini-batch counts trajectories, or questions.
  "mini-batch": lambda x, ours: (
    ours("curriculum.epochs") * math.ceil(ours("questions") * ours("group") / x)
  ),
  "mini-batch of questions": lambda x, ours: math.ceil(ours("questions") / x),
}


def places() -> dict[str, dict[str, Any]]:
  """Returns the entries of originals.toml, by system."""
  return tomllib.loads(
    pathlib.Path(__file__).with_name("originals.toml").read_text("utf-8")
  )


def rows(table: str, system: str = "") -> list[dict[str, str]]:
  """Returns the rows of both files `table`.csv, or those of a system."""
  found: list[dict[str, str]] = []
  for folder in ("configs", "research/methods"):
    with (_ROOT / folder / f"{table}.csv").open(newline="") as file:
      found += csv.DictReader(file)
  return [row for row in found if system in ("", row["system"])]


def recipe(system: str) -> aj.ExperimentConfig:
  """Returns the recipe of a system's authors on Qwen2.5-7B."""
  preset = f"{system}:qwen2_5_7b:original"
  if system in methods.COMPARED:
    return plug_ins.get_config(preset)
  return configs.get_config(preset)


def compared(system: str, checkout: pathlib.Path) -> tuple[int, list[str]]:
  """Returns how many cited lines were read, and what does not agree."""
  cited, wrong = rows("fidelity", system), []
  config = recipe(system)
  method = aj.get_method(config.method.name)

  def ours(setting: str) -> Any:
    name = setting.removeprefix("options.")
    if name != setting:
      return getattr(method.constants_of(config), name)
    return operator.attrgetter(setting)(config)

  script = places().get(system, {}).get("script", "")
  for row in cited:
    for each in problems(row, checkout, script, ours):
      wrong.append(f"{system} {row['setting']}: {each}")
  for row in rows("fidelity_rules", system):
    for each in _missing(row["where"], checkout):
      wrong.append(f"{system} {row['text or rule']}: {each}")
  return sum(bool(_PLACE.match(row["where"])) for row in cited), wrong


def problems(
  row: Mapping[str, str], checkout: pathlib.Path, script: str, ours: Recipe
) -> list[str]:
  """Returns what is wrong with a row of configs/fidelity.csv."""
  missing = [*_missing(row["where"], checkout)]
  place = _PLACE.match(row["where"])
  if missing or place is None:
    return missing
  return [*_line(row, place[1], int(place[2]), checkout, script, ours)]


def _missing(where: str, checkout: pathlib.Path) -> Iterator[str]:
  """Yields what is wrong with a place."""
  for part in filter(None, where.split("; ")):
    symbol, _, file = part.rpartition(" in ")
    file, _, line = file.partition(":")
    if "/" not in file and "." not in file:
      continue  # A place in words, such as "the paper".
    path = checkout / file
    if not path.exists():
      yield f"found no {file}; expected it in {checkout}"
    elif line and int(line) > len(path.read_text("utf-8").splitlines()):
      yield f"found fewer lines than {line} in {file}"
    elif symbol and symbol not in path.read_text("utf-8"):
      yield f"found no {symbol!r} in {file}"


def _line(
  row: Mapping[str, str],
  file: str,
  number: int,
  checkout: pathlib.Path,
  script: str,
  ours: Recipe,
) -> Iterator[str]:
  """Yields what is wrong with a row that cites a line."""
  lines = (checkout / file).read_text("utf-8").splitlines()
  line, word = lines[number - 1], row["authors"].split(" ")[0]
  value = _as_number(word)
  numbers = [_as_number(each) for each in _NUMBER.findall(line)]
  if value not in numbers if value is not None else word not in line:
    yield f"found {line.strip()!r} at {file}:{number}; expected {word!r}"
    return
  if file == script:
    later = [key for each in lines[number:] for key in _keys(each)]
    if again := {*_keys(line)} & {*later}:
      yield f"{file}:{number}: found that later lines set {again} again"
  elif script:
    keys = {*_yaml_key(lines, number)} if file.endswith("ml") else {*()}
    keys |= {*re.findall(r'"(--[\w-]+)"', line)}
    text = (checkout / script).read_text("utf-8").splitlines()
    for at, each in enumerate(text, 1):
      if set_ := keys & {*_keys(each)}:
        yield (
          f"found {file}:{number}, but {script}:{at} sets {set_}; expected "
          "that line to be cited"
        )
  rule, mine = row["rule"], ours(row["setting"])
  if rule == "reading":
    return
  if rule == "differs":
    if not row["why"] or value is not None and value == mine:
      yield f"found the rule 'differs' for {mine!r}; expected another and why"
    return
  expected = word if value is None else RULES[rule](value, ours)
  if expected != mine:
    yield f"found {mine!r} in our recipe; expected {expected!r} ({rule or '='})"


def _as_number(text: str) -> float | None:
  try:
    return float(text.replace(",", ""))
  except ValueError:
    return None


def _keys(line: str) -> Iterator[str]:
  """Yields the settings that a line of a shell script sets to a value."""
  if line.lstrip().startswith("#"):
    return
  for key in _SETS.findall(f" {line}"):
    if "." in key or key.startswith("--") or f"{key}=" in line:
      yield key


def _yaml_key(lines: list[str], number: int) -> Iterator[str]:
  """Yields the dotted key of a line of YAML."""
  key, indent = "", math.inf
  for line in reversed(lines[:number]):
    match = re.match(r"( *)([\w-]+):", line)
    if match and len(match[1]) < indent:
      key, indent = f"{match[2]}.{key}".rstrip("."), len(match[1])
  yield key
