"""The lists of requirements agree with each other."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import tomllib

from packaging import requirements, utils

ROOT = pathlib.Path(__file__).resolve().parents[2]
ACCELERATORS = ("cuda12", "cuda13", "tpu")


def read(name):
  lines = (ROOT / name).read_text().splitlines()
  stripped = (line.partition("#")[0].strip() for line in lines)
  return [requirements.Requirement(line) for line in stripped if line]


def locked(name="*"):
  """Returns the locked versions of packages, of all that an extra adds too."""
  pins = {}
  for path in [ROOT / "requirements.lock", *ROOT.glob(f"locks/{name}.lock")]:
    text = re.sub(r"#.*", "", path.read_text()).replace("\\\n", " ")
    for line in filter(str.strip, text.split("\n")):
      pin, *hashes = line.split(" --hash=")
      assert hashes, (path, pin)
      want = requirements.Requirement(pin.strip())
      (specifier,) = want.specifier
      assert specifier.operator == "==", pin
      name = utils.canonicalize_name(want.name)
      assert pins.setdefault(name, specifier.version) == specifier.version
  return pins


def needed():
  """Returns the packages that the requirements need, directly or not."""
  waiting, found = read("requirements.txt"), set()
  while waiting:
    want = waiting.pop()
    name = utils.canonicalize_name(want.name)
    if name in found:
      continue
    found.add(name)
    for each in importlib.metadata.requires(want.name) or []:
      more = requirements.Requirement(each)
      extras = ("", *want.extras)
      if more.marker is None or any(
        more.marker.evaluate({"extra": extra}) for extra in extras
      ):
        waiting.append(more)
  return found


def extras():
  """Returns the requirements of each extra."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  return {
    name: [requirements.Requirement(line) for line in lines]
    for name, lines in project["optional-dependencies"].items()
  }


def test_requirements_are_the_dependencies_and_the_extra_train():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  parts = [*project["dependencies"], *project["optional-dependencies"]["train"]]
  assert read("requirements.txt") == [*map(requirements.Requirement, parts)]


def test_every_requirement_has_a_lower_and_an_upper_bound():
  for want in [
    *read("requirements.txt"),
    *(
      want
      for name in ACCELERATORS
      for want in extras()[name]
      if want.name != "anysearch_jax"
    ),
  ]:
    operators = {each.operator for each in want.specifier}
    assert {">=", "<"} <= operators, want


def test_locked_versions_are_allowed():
  wanted = {"": read("requirements.txt"), **extras()}
  assert {path.stem for path in ROOT.glob("locks/*")} == {*extras()} - {
    "oracles",
    "train",
  }
  for extra, want in ((x, want) for x in wanted for want in wanted[x]):
    if extra == "train":  # requirements.lock has it.
      extra = ""
    if extra != "oracles" and want.name != "anysearch_jax":
      pins = locked(extra)
      pin = pins[utils.canonicalize_name(want.name)]
      assert want.specifier.contains(pin), (want, pin)


def test_lock_has_every_package_that_an_installation_brings():
  assert needed() - set(locked()) == set()


def test_accelerators_take_the_versions_of_jax_that_the_default_takes():
  (default,) = (x for x in read("requirements.txt") if x.name == "jax")
  for name in ACCELERATORS:
    own = next(x for x in extras()[name] if x.name == "jax")
    assert (own.extras, own.specifier) == ({name}, default.specifier)
