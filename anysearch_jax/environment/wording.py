"""The texts of an environment, read from files, which users can replace.

A file is TOML: names with strings. `{B}` is a placeholder; `{{` and `}}` are
the braces themselves. The shipped files are in `methods/texts/`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import string
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from anysearch_jax.environment import spec
from anysearch_jax.host import json_files

SHIPPED = pathlib.Path(__file__).parents[1] / "methods" / "texts"


class Slots(NamedTuple):
  """The placeholders that a text must have, and those that it may have."""

  needs: tuple[str, ...] = ()
  may: tuple[str, ...] = ()


LINE = Slots()
PROMPT = Slots(needs=("Question",), may=("B",))
# The texts of an environment with the same prompt in both phases.
ONE_PROMPT = {"prompt": PROMPT, "over_budget": LINE, "no_action": LINE}
# Optional texts of every environment: a system message, the beginning of the
# response, and a prompt without a chat template, which replaces the others.
BEGINNINGS = {"system": Slots(may=("B",)), "prefill": LINE, "base": PROMPT}


class Texts(NamedTuple):
  """The texts of a file.

  Attributes:
    values: texts by name, with their placeholders.
    file: path of the file, or the name of a shipped one.
    sha256: hash of the names and texts; comments and layout do not affect it.
  """

  values: Mapping[str, str]
  file: str
  sha256: str


@dataclasses.dataclass(frozen=True, eq=False)
class Wording:
  """The texts that an environment needs, and the function that builds it.

  Attributes:
    shipped: name of the shipped file, in `folder`.
    slots: the placeholders of each text, by the text's name.
    build: returns the environment from the texts.
    folder: folder of the shipped file.
    optional: the placeholders of texts that a file may lack, besides
      `BEGINNINGS`.
  """

  shipped: str
  slots: Mapping[str, Slots]
  build: Callable[[Mapping[str, str]], spec.Environment]
  folder: pathlib.Path = SHIPPED
  optional: Mapping[str, Slots] = dataclasses.field(default_factory=dict)

  @functools.cache  # noqa: B019 - wordings live as long as the process.
  def texts(self, file: str = "") -> Texts:
    """Returns the texts of a file.

    A process reads a file once, so editing it does not change a run.

    Args:
      file: path of the file; "": the shipped one.

    Raises:
      ValueError: the file cannot be read, lacks a text or a placeholder, or has
        an unknown one.
    """
    shipped = self.folder / self.shipped
    path = pathlib.Path(file) if file else shipped
    optional = {**BEGINNINGS, **self.optional}
    values = read(path, self.slots, optional, shipped=str(shipped))
    return Texts(values, file or self.shipped, json_files.sha256(values))

  @functools.cache  # noqa: B019
  def environment(self, file: str = "") -> spec.Environment:
    """Returns the environment with the texts of a file; raises as `texts`."""
    values = self.texts(file).values
    changes: dict[str, Any] = {
      name: template(values[name]) for name in BEGINNINGS if name in values
    }
    if base := changes.pop("base", ""):
      changes = {"scaffold": base, "plain": base}
    return dataclasses.replace(self.build(values), chat=not base, **changes)

  def then(
    self, change: Callable[[spec.Environment], spec.Environment]
  ) -> Wording:
    """Returns a wording of the same texts whose environment is changed."""
    return dataclasses.replace(
      self, build=lambda values: change(self.build(values))
    )


def read(
  path: pathlib.Path,
  slots: Mapping[str, Slots],
  optional: Mapping[str, Slots] = {},
  *,
  shipped: str = "",
) -> dict[str, str]:
  """Returns the texts of a file.

  Args:
    path: path of the file.
    slots: the placeholders of each text, by the text's name.
    optional: the placeholders of texts that the file may lack.
    shipped: name of the shipped file with these texts, for errors; "": the name
      of `path`.

  Raises:
    ValueError: as `Wording.texts`.
  """
  try:
    values = tomllib.loads(path.read_bytes().decode("utf-8"))
  except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
    raise ValueError(
      f"{path}: found {error}; expected a file of TOML such as "
      f'prompt = """...""", as in {SHIPPED}.'
    ) from error
  for name, text in values.items():
    if not isinstance(text, str):
      raise ValueError(
        f"{path}: {name}: found {type(text).__name__}, expected a string."
      )
  if values.keys() - optional.keys() != slots.keys():
    raise ValueError(
      f"{path}: found the texts {', '.join(sorted(values)) or '(none)'}; "
      f"expected {', '.join(sorted(slots))}, as in "
      f"{SHIPPED / (shipped or path.name)}."
    )
  for name, text in values.items():
    _check_slots(f"{path}: {name}", text, {**slots, **optional}[name])
  return values


def joined(content: str, system: str, prefill: str) -> str:
  """Returns a prompt without a chat template, as one text.

  Args:
    content: the user message.
    system: the system message; "" is omitted.
    prefill: beginning of the response.
  """
  return "\n\n".join(filter(None, (system, content))) + prefill


def template(text: str) -> str:
  """Returns a text as a template of `spec.Environment`, with single braces."""
  return text.replace("{{", "{").replace("}}", "}")


def _check_slots(location: str, text: str, slots: Slots) -> None:
  """Raises ValueError unless a text has the placeholders that it must have."""
  names = (*slots.needs, *slots.may)
  allowed = ", ".join(f"{{{name}}}" for name in names) or "none"
  expected = (
    f"expected one of its placeholders ({allowed}), or {{{{ and }}}} for the "
    "braces themselves."
  )
  found_names = set()
  try:
    for _, name, form, conversion in string.Formatter().parse(text):
      if name is not None and (name not in names or form or conversion):
        raise ValueError(f"'{{{name}}}'")
      found_names.add(name)
  except ValueError as error:
    raise ValueError(f"{location}: found {error}, {expected}") from error
  for name in slots.needs:
    if name not in found_names:
      raise ValueError(
        f"{location}: found no placeholder {{{name}}}; it has {allowed}."
      )
