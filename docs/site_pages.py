"""Pages of the site without a file in docs/; MkDocs calls this, see mkdocs.yml.

They are README.md and the other pages of the root, with their links rewritten,
and a page for each room of the library, from its docstrings.
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
LIBRARY = ROOT / "anysearch_jax"
sys.path.insert(0, str(ROOT))


def on_config(config):
  """Adds a section with a page for each room to the navigation."""
  pages = [f"api/{room}.md" for room in rooms()]
  config.nav.append({"API": ["api/index.md", *pages]})
  return config


def on_files(files, *, config):
  """Adds the pages."""
  for name, page in PAGES.items():
    text = (ROOT / name).read_text("utf-8")
    files.append(File.generated(config, page, content=relinked(text)))
  for room, modules in rooms().items():
    lines = [f"# {room}\n", *(f"::: {module}\n" for module in modules)]
    page = File.generated(config, f"api/{room}.md", content="\n".join(lines))
    files.append(page)
  files.append(File.generated(config, "api/index.md", content=public()))
  files.append(File.generated(config, "configuration.md", content=settings()))
  return files


def on_page_markdown(text, **_):
  """Makes links out of docs/, as to examples/, plain text."""
  return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", text)


def public() -> str:
  """A page with the public names, linked to their objects."""
  import anysearch_jax  # Imports nothing of the library yet.

  rows = [
    f"| `anysearch_jax.{name}` | [{place}][{place}] |"
    for name, parts in anysearch_jax._PUBLIC.items()
    for place in [".".join(filter(None, parts))]
  ]
  return "\n".join(["# Public API\n", "| name | is |", "|---|---|", *rows])


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


def rooms() -> dict[str, list[str]]:
  """The modules of each room by their dotted names."""
  found = {
    path.stem: [f"anysearch_jax.{path.stem}"]
    for path in sorted(LIBRARY.glob("[!_]*.py"))
  }
  commands = (LIBRARY / "launch", LIBRARY / "configs")
  folders = sorted(
    path.parent
    for path in LIBRARY.glob("*/__init__.py")
    if path.parent not in commands
  )
  for folder in folders:
    paths = [path.relative_to(ROOT) for path in sorted(folder.rglob("*.py"))]
    found[folder.name] = [
      ".".join(folder.relative_to(ROOT).parts),
      *(
        ".".join(path.with_suffix("").parts)
        for path in paths
        if not path.name.startswith("_")
      ),
    ]
  return found
