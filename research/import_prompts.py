r"""Writes a prompt file with the texts of a compared system's authors.

    git clone https://github.com/sunnynexus/Search-o1 checkouts/search_o1
    python -m research.import_prompts --system=search_o1 \
        --checkout=checkouts/search_o1 --output=search_o1.toml
    python -m launch.evaluate --config=configs/methods.py:search_o1:qwen2_5_7b \
        --config.episode.prompt_file=search_o1.toml ...

With --base the file has the prompt of base models, which is sent without a chat
template.

The texts are strings of the source files, which are not executed, and each is
found by its SHA-256 at the commit that this project knows. Texts that the
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

from research import methods, originals


@dataclasses.dataclass(frozen=True)
class Place:
  """A string in a Python file.

  Attributes:
    file: path in the repository.
    line: where the string begins at the known commit.
    sha256: hash of the text, with its placeholders renamed by `names`.
    names: placeholders by the variables that the text interpolates.
    inner: whether only the lines between the first and the last are the text.
    filled: whether the text's own braces are the placeholders, by `names`.
  """

  file: str
  line: int
  sha256: str
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  inner: bool = False
  filled: bool = False


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
  print(f"{output}: for episode.prompts={methods.prompts_name(f.system)}")
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
    ValueError: the folder or a text is missing, or base models have no prompt.
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
  words = methods.wording(system)
  kept = sorted(words.slots.keys() - found.keys())
  shipped = words.texts().values
  comments = [
    f"Read by research.import_prompts from {original.repository}; the known",
    f"commit is {original.commit}.",
    *(
      f"{name}: {place.file}:{place.line}"
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
  """Returns the text with the known hash, wherever in the file it is."""
  path = checkout / place.file
  texts = [*_texts(place, path)] if path.is_file() else []
  for _, text in texts:
    if hashlib.sha256(text.encode()).hexdigest() == place.sha256:
      return text
  there = [text for line, text in texts if line == place.line]
  if allow_changes and there:
    return max(there, key=len)
  raise ValueError(
    f"{path}: found no text with sha256 {place.sha256[:12]}; expected it at "
    f"line {place.line}, as in commit {commit[:7]} of the repository. "
    "--allow_changes takes the longest text that begins there."
  )


def _texts(place: Place, path: pathlib.Path) -> Iterator[tuple[int, str]]:
  """Yields the line and the text of a file's strings, as `place` says."""
  try:
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
  except SyntaxError as error:
    raise ValueError(f"{path}: found no Python ({error}).") from error
  parts = {
    part
    for node in nodes
    if isinstance(node, ast.JoinedStr)
    for part in ast.walk(node)
    if part is not node
  }
  for node in nodes:
    if not isinstance(node, ast.expr) or node in parts:
      continue
    text = _template(node, place.names)
    if text is None:
      continue
    if place.filled:
      text = text.replace("{{", "{").replace("}}", "}")
      for name, own in place.names.items():
        text = text.replace(f"{{{name}}}", f"{{{own}}}")
    yield node.lineno, text.strip() if place.inner else text


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
