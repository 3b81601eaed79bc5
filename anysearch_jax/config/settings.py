"""What a setting is: one line of its group, and a sentence beneath it.

    learning_rate: float = learning(1e-6, at_least(0))
    \"\"\"The policy's learning rate.\"\"\"

The function names the setting's kind, which says when its value may change; its
arguments are the default and what the value may be. `check`, `--help`, the
decision at a resume (`changes`) and the page of all settings read these lines.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import json
import math
import sys
import typing
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Kind(enum.StrEnum):
  """What a setting decides.

  IDENTITY: which run it is: its seed, its questions, their order and number,
    the system, the shapes of what a checkpoint holds. It never changes.
  LEARNING: what is learned and from which texts: rates, rewards, lengths. It
    may change at a resume with `--allow_changes`.
  PLACEMENT: where and how fast the run computes, what it keeps and watches, and
    paths; the files at them are compared by hash, see provenance.json. It may
    change at every start.
  """

  IDENTITY = "identity"
  LEARNING = "learning"
  PLACEMENT = "placement"


class Range(NamedTuple):
  """What a value, or each item of a tuple, may be.

  Attributes:
    words: describes the range in messages and documentation.
    holds: returns whether a value is in the range; False for NaN.
    empty: whether a tuple may have no item.
  """

  words: str
  holds: Callable[[Any], bool]
  empty: bool = False


def at_least(least: float) -> Range:
  """The range of numbers from `least` on."""
  return Range(f"at least {least}", lambda x: x >= least)


def one_of(*values: str) -> Range:
  """The range of some texts."""
  return Range(f"one of {', '.join(values)}", lambda x: x in values)


def or_empty(items: Range) -> Range:
  """The range of a tuple that may be empty."""
  return items._replace(empty=True)


ANY = Range("", lambda _: True, empty=True)
POSITIVE = Range("above 0", lambda x: x > 0)
SHARE = Range("a share, 0 to 1", lambda x: 0 <= x <= 1)
DECAY = Range("0 to below 1", lambda x: 0 <= x < 1)
# JAX takes a seed modulo 2^32, so two larger seeds could give the same draws.
SEED = Range("0 to 2^32 - 1", lambda x: 0 <= x < 2**32)
TOP_P = Range("above 0, at most 1", lambda x: 0 < x <= 1)
# A reward on the scale where a right answer earns 1.
REWARD = Range("-1 to 1", lambda x: -1 <= x <= 1)
_FINITE = Range("a finite number", math.isfinite)


class Meta(NamedTuple):
  """What a field's metadata holds.

  Attributes:
    kind: when the value may change.
    range: what the value may be.
    switch: whether a change between 0 and another number is one of identity,
      because it changes the structure of the optimizer's state.
  """

  kind: Kind
  range: Range
  switch: bool = False


def identity(default: T, range: Range = ANY) -> T:
  """A setting that never changes during a run."""
  return _field(default, Meta(Kind.IDENTITY, range))


def learning(default: T, range: Range = ANY, *, switch: bool = False) -> T:
  """A setting that may change at a resume, if the user allows it.

  Args:
    default: its default.
    range: what the value may be.
    switch: see `Meta`.
  """
  return _field(default, Meta(Kind.LEARNING, range, switch))


def placement(default: T, range: Range = ANY) -> T:
  """A setting that may change at every start."""
  return _field(default, Meta(Kind.PLACEMENT, range))


def _field(default: Any, meta: Meta) -> Any:
  return dataclasses.field(default=default, metadata={"setting": meta})


class Setting(NamedTuple):
  """A setting of a configuration, or one of its groups.

  Attributes:
    path: its dotted path, such as `reward.alpha`; "" for the whole.
    value: its value; a dataclass if it is a group.
    meta: None for a group.
    sentence: what it means; of a group, the beginning of its docstring.
  """

  path: str
  value: Any
  meta: Meta | None
  sentence: str


def listed(group: Any, path: str = "") -> Iterator[Setting]:
  """Yields a group of settings, its settings, then the groups in it.

  `path` is that of the group itself; "" for a whole configuration.
  """
  yield Setting(path, group, None, (inspect.getdoc(group) or "").strip())
  of_class = _sentences(type(group).__module__)
  sentences = of_class.get(type(group).__name__, {})
  groups = []
  for field in dataclasses.fields(group):
    inner = f"{path}.{field.name}" if path else field.name
    value = getattr(group, field.name)
    meta = field.metadata.get("setting")
    if meta is None and dataclasses.is_dataclass(value):
      groups.append((value, inner))
    elif meta is not None:
      yield Setting(inner, value, meta, sentences.get(field.name, ""))
  for value, inner in groups:
    yield from listed(value, inner)


@functools.cache
def _sentences(module: str) -> dict[str, dict[str, str]]:
  """Returns the string beneath each field, by class and name."""
  tree = ast.parse(inspect.getsource(sys.modules[module]))
  return {
    node.name: {
      field.target.id: " ".join(str(below.value.value).split())
      for field, below in zip(node.body, node.body[1:])
      if isinstance(field, ast.AnnAssign)
      and isinstance(field.target, ast.Name)
      and isinstance(below, ast.Expr)
      and isinstance(below.value, ast.Constant)
    }
    for node in tree.body
    if isinstance(node, ast.ClassDef)
  }


def check(group: Any, path: str = "") -> None:
  """Refuses values outside their ranges, and tuples that must not be empty.

  `training.validation` checks how values fit together.

  Args:
    group: an `ExperimentConfig`, or the part of one at `path`.
    path: "" for the whole; `sampling` for a `SamplingConfig`.

  Raises:
    ValueError: the message names the path of the first such value and what was
      expected.
  """
  for inner, value, meta, _ in listed(group, path):
    if meta is None:
      continue
    items = [(inner, value)]
    if isinstance(value, tuple):
      items = [(f"{inner}[{i}]", item) for i, item in enumerate(value)]
      if not value and not meta.range.empty:
        raise ValueError(
          f"{inner}: found (), expected one number or more, each "
          f"{meta.range.words}."
        )
    for item_path, item in items:
      is_number = isinstance(item, int | float) and not isinstance(item, bool)
      for allowed in (meta.range, _FINITE) if is_number else (meta.range,):
        if not allowed.holds(item):
          raise ValueError(
            f"{item_path}: found {item!r}, expected {allowed.words}."
          )


def to_dict(config: Any) -> dict[str, Any]:
  """Returns a configuration dataclass as nested dicts; tuples stay tuples."""
  return dataclasses.asdict(config)


def leaves(
  values: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any]]:
  """Yields the values of nested dicts with their dotted paths."""
  for key, value in values.items():
    if isinstance(value, Mapping):
      yield from leaves(value, f"{path}{key}.")
    else:
      yield f"{path}{key}", value


def unknown(name: str, value: object, names: Iterable[str]) -> ValueError:
  """Returns the error of a setting whose value is not one of its names.

  Args:
    name: of the setting.
    value: its value.
    names: the values that it may have.
  """
  expected = ", ".join(filter(None, names))
  return ValueError(f"{name}: found {value!r}, expected one of {expected}.")


def require(name: str, value: str, names: Collection[str]) -> None:
  """Checks that the value of a setting is one of its names.

  Args:
    name: of the setting.
    value: its value.
    names: the values that it may have.

  Raises:
    ValueError: it has another value.
  """
  if value not in names:
    raise unknown(name, value, names)


# Groups that earlier versions saved under another name.
_PRESENT_NAMES = {"sglang": "servers"}


def _with_present_names(saved: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a saved configuration with the present names of its groups."""
  return {_PRESENT_NAMES.get(key, key): value for key, value in saved.items()}


def from_dict(cls: type, values: Mapping[str, Any], *, path: str = "config"):
  """Builds config dataclass `cls` from nested plain values, strictly.

  Raises:
    ValueError: a key is unknown or a value has the wrong type; the message
      names its path.
  """
  values = _with_present_names(values)
  hints = typing.get_type_hints(cls)
  fields = {field.name for field in dataclasses.fields(cls)}
  unknown_keys = sorted(set(values) - fields)
  if unknown_keys:
    raise ValueError(
      f"{path}: unknown key {unknown_keys[0]!r}; expected one of "
      f"{', '.join(sorted(fields))}."
    )
  return cls(
    **{
      key: typed(hints[key], value, f"{path}.{key}")
      for key, value in values.items()
    }
  )


def typed(hint: Any, value: Any, path: str) -> Any:
  """Converts a plain value to the type of a setting.

  Args:
    hint: the type: a number, text, a tuple of these, or a group of settings.
    value: from JSON or a flag.
    path: of the setting, for the error.

  Raises:
    ValueError: the value has another type.
  """
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise ValueError(f"{path}: found {value!r}, expected a group of values.")
    return from_dict(hint, value, path=path)
  if typing.get_origin(hint) is tuple:
    if not isinstance(value, list | tuple):
      raise ValueError(f"{path}: found {value!r}, expected a list.")
    (item, _) = typing.get_args(hint)
    return tuple(typed(item, v, f"{path}[{i}]") for i, v in enumerate(value))
  if hint is float and type(value) is int:
    return float(value)
  if type(value) is not hint:
    raise ValueError(
      f"{path}: found {value!r} ({type(value).__name__}), expected "
      f"{hint.__name__}."
    )
  return value


def literal(hint: Any, text: str) -> Any:
  """Parses the text of a value as a Python literal, but not of a string.

  Args:
    hint: the type of the setting. Items of a tuple of strings are separated by
      commas.
    text: as it is given to a flag.

  Returns:
    The value, of which `typed` says whether it has the type; the text itself if
    it is no literal.
  """
  if hint is str:
    return text
  if typing.get_args(hint)[:1] == (str,) and not text.startswith(("(", "[")):
    return tuple(filter(None, text.split(",")))
  try:
    value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
  except (ValueError, SyntaxError):
    return text
  return (
    value
    if typing.get_origin(hint) is not tuple or isinstance(value, tuple | list)
    else (value,)
  )


def with_options(defaults: T, assignments: Iterable[str], *, path: str) -> T:
  """Returns a dataclass with the values that `NAME=VALUE` texts give it.

  Args:
    defaults: a dataclass; settings among its fields are checked (`check`).
    assignments: the texts; the last one of a name counts.
    path: of the setting that holds them, for sentences.

  Raises:
    ValueError: a text is no `NAME=VALUE` of a field, or the value has another
      type or is out of range.
  """
  hints = typing.get_type_hints(type(defaults))
  values = {}
  for assignment in assignments:
    name, separator, text = assignment.partition("=")
    if not separator or name not in hints:
      raise ValueError(
        f"{path}: found {assignment!r}, expected NAME=VALUE of one of "
        f"{', '.join(hints)}."
      )
    hint = hints[name]
    values[name] = typed(hint, literal(hint, text), f"{path} {name}")
  options = dataclasses.replace(defaults, **values)  # type: ignore[type-var]
  check(options, path)
  return options


class Change(NamedTuple):
  """A setting that differs from that of an earlier start.

  Attributes:
    path: its dotted path.
    kind: says whether it may change.
    old, new: its values, as JSON.
  """

  path: str
  kind: Kind
  old: Any
  new: Any

  def __str__(self) -> str:
    return f"{self.path} {json.dumps(self.old)} -> {json.dumps(self.new)}"


def changes(stored: Mapping[str, Any], config: Any) -> list[Change]:
  """Returns the settings that differ from those of an earlier start.

  Args:
    stored: the earlier configuration as it was saved. A setting that it lacks
      is newer than that start, and counts as its default.
    config: the present configuration.
  """
  old, new, default = (
    dict(leaves(json.loads(json.dumps(values))))
    for values in (
      _with_present_names(stored),
      to_dict(config),
      to_dict(type(config)()),
    )
  )
  metas = {setting.path: setting.meta for setting in listed(config)}
  old = default | old
  return [
    Change(
      path, _kind(metas.get(path), value, new.get(path)), value, new.get(path)
    )
    for path, value in old.items()
    if path not in new or value != new[path]
  ]


def _kind(meta: Meta | None, old: Any, new: Any) -> Kind:
  if meta is None:
    # A setting that this version no longer has cannot change any shape.
    return Kind.LEARNING
  return Kind.IDENTITY if meta.switch and bool(old) != bool(new) else meta.kind


def refusal(changed: Sequence[Change], *, allow: bool) -> str:
  """Returns why a run must not resume with these changes; "" if it may.

  `allow` says whether settings of learning may differ.
  """
  if fixed := describe(changed, Kind.IDENTITY):
    return (
      f"found {fixed}: such settings say which run it is and never change. "
      "Resume with what the run began with, or name another --output."
    )
  learned = describe(changed, Kind.LEARNING)
  if learned and not allow:
    return (
      f"found {learned}: this changes what is learned. Give --allow_changes "
      "to resume with it, or resume with what the run had."
    )
  return ""


def describe(changed: Sequence[Change], kind: Kind) -> str:
  """Returns the changes of a kind in words; "" if there are none."""
  return ", ".join(str(change) for change in changed if change.kind == kind)
