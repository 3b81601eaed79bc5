r"""Writes a prompt file with the texts of a compared system's authors.

    git clone https://github.com/sunnynexus/Search-o1 checkouts/search_o1
    python -m research.import_prompts --system=search_o1 \
        --checkout=checkouts/search_o1 --output=search_o1.toml
    python -m launch.evaluate --config=configs/methods.py:search_o1:qwen2_5_7b \
        --config.episode.prompt_file=search_o1.toml ...

With --base the file has the prompt of base models, which is sent without a chat
template.

The texts are read from the source files, which are not executed, and each is
compared with the SHA-256 of the commit that this project knows. Texts that the
repository lacks keep this project's words; the file's first lines say which.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping

from absl import app, flags

import anysearch_jax as aj
from research import originals


@dataclasses.dataclass(frozen=True)
class Place:
  """A text in a Python file.

  Attributes:
    file: path in the repository.
    sha256: hash of the text, with its placeholders renamed by `names`.
    function: name of the function that holds the text; "": none does.
    variable: name that the text is assigned to, alone or as the content of a
      chat's messages; "" for a text that is returned or appended to a list.
    index: which of the function's texts with that variable, in source order.
    names: placeholders by the variables that the text interpolates.
    inner: whether only the lines between the first and the last are the text.
    filled: whether the text's own braces are the placeholders, by `names`.
  """

  file: str
  sha256: str
  function: str = ""
  variable: str = ""
  index: int = 0
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  inner: bool = False
  filled: bool = False

  @property
  def symbol(self) -> str:
    """The function or the variable, for messages."""
    return f"{self.function}()" if self.function else self.variable


@dataclasses.dataclass(frozen=True)
class Original:
  """The texts of a system's authors.

  Attributes:
    repository: on GitHub.
    commit: the one that the hashes are of.
    texts: places whose texts are joined, by the name of the text in the prompt
      file; a string among them joins as it is. Names that are missing keep the
      shipped texts.
  """

  repository: str
  commit: str
  texts: Mapping[str, tuple[Place | str, ...]]


ORIGINALS = {
  system: Original(
    read["repository"],
    read["commit"],
    {
      name: tuple(each.get("text") or Place(**each) for each in places)
      for name, places in read["texts"].items()
    },
  )
  for system, read in originals.places().items()
  if "texts" in read
}
# Of what TOML strings must escape, the texts may hold these.
_ESCAPED = {"\\": "\\\\", "\r": "\\r", "\x7f": "\\u007f"} | {
  chr(code): f"\\u{code:04x}" for code in range(32) if chr(code) not in "\t\n\r"
}


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_enum(
    "system",
    None,
    sorted(ORIGINALS),
    "Whose texts; docs/own.md says which systems have none.",
    required=True,
  )
  flags.DEFINE_string(
    "checkout", None, "Folder of that system's repository.", required=True
  )
  flags.DEFINE_string("output", None, "The prompt file.", required=True)
  flags.DEFINE_bool(
    "allow_changes", False, "Takes texts that differ from the known commit's."
  )
  flags.DEFINE_bool("base", False, "Takes the prompt of base models.")


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  checkout, output = pathlib.Path(f.checkout), pathlib.Path(f.output)
  try:
    text, kept = imported(
      ORIGINALS[f.system],
      f.system,
      checkout,
      allow_changes=f.allow_changes,
      base=f.base,
    )
    output.write_text(text)
  except (OSError, ValueError) as error:
    sys.exit(f"research.import_prompts: {error}")
  print(f"{output}: for episode.prompts={f.system}")
  if kept:
    print(f"in this project's words: {', '.join(kept)}")


def imported(
  original: Original,
  system: str,
  checkout: pathlib.Path,
  *,
  allow_changes: bool = False,
  base: bool = False,
) -> tuple[str, list[str]]:
  """Returns a prompt file and the names of the texts that it keeps as shipped.

  Args:
    original: where the texts are.
    system: name of the environment that they are for.
    checkout: folder of the repository.
    allow_changes: whether a text may differ from the known one.
    base: whether the prompt is that of base models.

  Raises:
    ValueError: the folder or a text is missing, a text has changed, or base
      models have no prompt.
  """
  if base and "base" not in original.texts:
    known = [name for name, each in ORIGINALS.items() if "base" in each.texts]
    raise ValueError(
      f"--base: found no prompt of {system} for base models; expected one of "
      f"{', '.join(known)}."
    )
  if not checkout.is_dir():
    raise ValueError(
      f"--checkout={checkout}: found no folder; expected a clone of "
      f"https://github.com/{original.repository}."
    )
  found = {
    name: "".join(
      place
      if isinstance(place, str)
      else _read(place, checkout, original.commit, allow_changes)
      for place in places
    )
    for name, places in original.texts.items()
    if name not in (("system", "prefill") if base else ("base",))
  }
  words = aj.WORDINGS[system]
  kept = sorted(words.slots.keys() - found.keys())
  shipped = words.texts().values
  comments = [
    f"Read by research.import_prompts from {original.repository}; the known",
    f"commit is {original.commit}.",
    *(
      f"{name}: {place.file} {place.symbol.removesuffix('()')}"
      for name in found
      for place in original.texts[name]
      if isinstance(place, Place)
    ),
    f"In this project's words: {', '.join(kept) or 'none'}.",
  ]
  values = {name: shipped[name] for name in words.slots} | found
  return written(values, comments), kept


def written(values: Mapping[str, str], comments: Iterable[str] = ()) -> str:
  """Returns a file of these texts, after lines of comment."""
  lines = [f"# {line}".rstrip() for line in comments]
  blocks = []
  for name, text in values.items():
    body = text.removesuffix('"')
    escaped = "".join(_ESCAPED.get(letter, letter) for letter in body)
    escaped = escaped.replace('"""', '""\\"') + '\\"' * (body != text)
    blocks.append(f'{name} = """\n{escaped}"""\n')
  return "\n".join([*lines, "", *blocks] if lines else blocks)


def _read(
  place: Place,
  checkout: pathlib.Path,
  commit: str,
  allow_changes: bool,
) -> str:
  """Returns the text at a place, after comparing its hash."""
  path = checkout / place.file
  text = _text(place, path)
  wanted = f"the text of {place.symbol} with sha256 {place.sha256[:12]}"
  if text is None:
    raise ValueError(
      f"{path}: found no text of {place.symbol}; expected {wanted}. "
      f"Is this the right repository, at commit {commit[:7]}?"
    )
  found = hashlib.sha256(text.encode()).hexdigest()
  if not allow_changes and found != place.sha256:
    raise ValueError(
      f"{path}: found that the text of {place.symbol} has changed (sha256 "
      f"{found[:12]}); expected {wanted}. --allow_changes takes it as it is."
    )
  return text


def _text(place: Place, path: pathlib.Path) -> str | None:
  """Returns the text at a place of a file; None if there is none."""
  try:
    tree = ast.parse(path.read_text("utf-8"))
  except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
    return None
  scopes: list[list[ast.AST]] = [
    [*ast.walk(node)]
    for node in ast.walk(tree)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    and node.name == place.function
  ]
  texts = [
    text
    for nodes in (scopes if place.function else [[*tree.body]])
    for value in _values(nodes, place.variable)
    if (text := _template(value, place.names)) is not None
  ]
  if not -len(texts) <= place.index < len(texts):
    return None
  text = texts[place.index]
  if place.filled:
    text = text.replace("{{", "{").replace("}}", "}")
    for name, own in place.names.items():
      text = text.replace(f"{{{name}}}", f"{{{own}}}")
  return text.strip() if place.inner else text


def _values(nodes: Iterable[ast.AST], variable: str) -> Iterator[ast.expr]:
  """Yields what is assigned to a variable or, without one, handed out."""
  placed = [node for node in nodes if isinstance(node, (ast.stmt, ast.expr))]
  for node in sorted(placed, key=lambda each: (each.lineno, each.col_offset)):
    match node:
      case ast.Assign(
        targets=[ast.Name(id=name)], value=ast.List(elts=messages)
      ) if variable:
        if name == variable:
          yield from _contents(messages)
      case ast.Assign(targets=[ast.Name(id=name)], value=value) if variable:
        if name == variable:
          yield value
      case ast.Return(value=ast.expr() as value) if not variable:
        yield value
      case ast.Call(func=ast.Attribute(attr="append"), args=[value]):
        if not variable:
          yield value


def _contents(messages: Iterable[ast.expr]) -> Iterator[ast.expr]:
  """Yields the contents of a chat's messages."""
  for message in messages:
    if isinstance(message, ast.Dict):
      for key, value in zip(message.keys, message.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == "content":
          yield value


def _template(value: ast.expr, names: Mapping[str, str]) -> str | None:
  """Returns a string or f-string as a text of a prompt file, otherwise None."""
  parts = value.values if isinstance(value, ast.JoinedStr) else [value]
  text = ""
  for part in parts:
    match part:
      case ast.Constant(value=str(plain)):
        text += plain.replace("{", "{{").replace("}", "}}")
      case ast.FormattedValue(value=ast.Name(id=name)) if name in names:
        text += f"{{{names[name]}}}" if names[name] else ""
      case _:
        return None
  return text


if __name__ == "__main__":
  define_flags()
  app.run(main)
