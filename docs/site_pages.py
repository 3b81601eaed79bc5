"""Pages of the site without a file in docs/; MkDocs calls this, see mkdocs.yml.

They are README.md and the other pages of the root, with their links rewritten,
the settings, and the public API from its docstrings.
"""

from __future__ import annotations

import pathlib
import re
import sys

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = {
  "README.md": "index.md",
  "WORKSPACE.md": "map.md",
  "CONTRIBUTING.md": "contributing.md",
  "CHANGELOG.md": "changelog.md",
}
sys.path.insert(0, str(ROOT))


def on_files(files, *, config):
  """Adds the pages."""
  for name, page in PAGES.items():
    text = (ROOT / name).read_text("utf-8")
    files.append(File.generated(config, page, content=relinked(text)))
  files.append(File.generated(config, "api.md", content=public()))
  files.append(File.generated(config, "configuration.md", content=settings()))
  return files


def on_page_markdown(text, **_):
  """Makes links out of docs/, as to examples/, plain text."""
  return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", text)


def public() -> str:
  """Returns a page with the docstrings of the public names."""
  import anysearch_jax  # Imports nothing of the library yet.

  places = {
    ".".join(filter(None, place)) for place in anysearch_jax._PUBLIC.values()
  }
  return "\n\n".join(["# Public API", *(f"::: {p}" for p in sorted(places))])


def settings() -> str:
  """A page with every setting, as `anysearch list settings` prints them."""
  from anysearch_jax import config
  from anysearch_jax.launch import flags

  text = flags.help_text(config.ExperimentConfig(), "the paper")
  lines = ["# Configuration"]
  for group in text.split("\n\n")[1:]:
    name = group.partition(":")[0].removeprefix("--")
    lines += [f"## {name}", f"```text\n{group}\n```"]
  return "\n\n".join(lines)


def relinked(text: str) -> str:
  """The page with links from the root turned into links between pages.

  A link to a file that is no page of the site becomes plain text.
  """
  text = re.sub(r"\]\(docs/", "](", text)
  for name, page in PAGES.items():
    text = text.replace(f"]({name}", f"]({page}")
  known = r"https?:|#|images/|[\w/]+\.md"
  return re.sub(rf"\[([^\]]*)\]\((?!{known})[^)]*\)", r"\1", text)
