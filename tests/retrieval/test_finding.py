"""Which files of a folder are read; git is the oracle for `.gitignore`."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time

import pytest

from anysearch_jax.retrieval.documents import exclusions, finding, reading

ENDINGS = (*reading.READERS,)
NAMES = ["a", "b.md", "foo", "x.log", "y.txt", "build", "a b", "#c", "!d", "é"]
SEGMENTS = ["a", "b.md", "foo", "*", "*.log", "?", "[ab]", "**", "build", "fo*"]
SEGMENTS += ["[!a]", "y.txt", r"\#c", r"\!d", "é", r"a\ b", "x.*", "*o*", ""]

needs_git = pytest.mark.skipif(
  shutil.which("git") is None, reason="needs git on the PATH"
)


def write(folder, *names, text="A word."):
  for name in names:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return folder


def found(*paths, endings=ENDINGS, excluded="nowhere", **settings):
  return finding.find_files(
    [str(path) for path in paths], endings, excluded_folder=excluded, **settings
  )


def names(*paths, **settings):
  return [file.name for file in found(*paths, **settings).files]


def git(folder, *arguments):
  done = subprocess.run(
    ["git", "-C", str(folder), "-c", "core.excludesFile=", *arguments],
    capture_output=True,
    check=True,
  )
  return os.fsdecode(done.stdout)


def pattern(draw):
  """Returns a random line of a `.gitignore`."""
  segments = [draw.choice(SEGMENTS) for _ in range(draw.choice([1, 1, 2, 3]))]
  line = "/".join(segments)
  line = draw.choice(["", "", "/", "!", "!", "!/"]) + line
  return line + draw.choice(["", "", "", "/", "/", "  ", "\r"])


@needs_git
@pytest.mark.parametrize("seed", range(40))
def test_gitignore_files_are_followed_as_git_follows_them(tmp_path, seed):
  draw = random.Random(seed)
  git(tmp_path, "init", "-q")
  folders = [tmp_path]
  for _ in range(9):
    path = draw.choice(folders) / draw.choice(NAMES)
    path.mkdir(exist_ok=True)
    folders.append(path)
  for _ in range(25):
    path = draw.choice(folders) / draw.choice(NAMES)
    if not path.exists():
      path.write_text("A word.")
  for folder in {*folders}:
    if folder == tmp_path or draw.random() < 0.5:
      lines = [pattern(draw) for _ in range(draw.randint(1, 5))]
      (folder / ".gitignore").write_text("\n".join(lines), newline="")
  listed = git(tmp_path, "ls-files", "-co", "--exclude-standard", "-z")
  wanted = {name for name in listed.split("\0") if name}
  wanted = {name for name in wanted if not name.endswith(".gitignore")}
  every_ending = {os.path.splitext(name)[1] for name in NAMES}
  assert {*names(tmp_path, endings=every_ending)} == wanted
  assert {*names(tmp_path, endings=every_ending, ignored_files=True)} >= wanted


@needs_git
def test_a_repository_lists_what_is_in_the_folders_below_it(tmp_path):
  """As for git, the lines above a folder count, up to a repository's root."""
  repository = tmp_path / "repository"
  write(tmp_path, ".gitignore", text="*.md\n")
  write(repository, ".gitignore", text="drafts/\n/notes/old.md\n*.log\n")
  write(repository, "notes/new.md", "notes/old.md", "notes/drafts/c.md")
  write(repository, "inner/x.log", "drafts/d.md")
  assert names(repository) == ["notes/new.md"]
  git(tmp_path, "init", "-q")
  assert names(repository) == []
  git(repository, "init", "-q")
  git(repository / "inner", "init", "-q")
  assert names(repository / "notes") == ["new.md"]
  assert names(repository) == ["inner/x.log", "notes/new.md"]
  assert names(repository / "**/*.md") == ["notes/new.md"]
  # What is itself given is read.
  assert names(repository / "drafts") == ["d.md"]
  assert names(repository / "notes/old.md") == ["old.md"]


def test_what_tools_write_is_left_out_and_counted(tmp_path):
  write(tmp_path, "app/src/a.py", "app/package.json", "app/package-lock.json")
  write(tmp_path, "app/node_modules/x/readme.md", "app/dist/a.js")
  write(tmp_path, "env/pyvenv.cfg", "env/lib/site-packages/b.py")
  write(tmp_path, "site-packages/c.py", "rust/Cargo.toml", "rust/target/d.md")
  write(tmp_path, "Lease.docx", "~$Lease.docx", "src/__pycache__/e.py")
  # Documents that people keep under such names.
  write(tmp_path, "target/customers.md", "build/plan.md", "dist/list.md")
  # Scripts: the repository's own list does not have them.
  write(tmp_path, "web/package.json", "web/build/config.js", "web/out/f.js")
  write(tmp_path, "web/.gitignore", text="out/\n")
  wanted = ["Lease.docx", "app/package.json", "app/src/a.py", "build/plan.md"]
  wanted += ["dist/list.md", "rust/Cargo.toml", "target/customers.md"]
  wanted += ["web/build/config.js", "web/package.json"]
  assert names(tmp_path) == wanted
  folders = ["node_modules/", "dist/", "env/", "site-packages/", "target/"]
  reasons = {"lock file": 2, "of .gitignore": 1, "hidden": 1}
  counts = reasons | dict.fromkeys([*folders, "__pycache__/"], 1)
  assert found(tmp_path).ignored == counts
  everything = names(tmp_path, ignored_files=True)
  assert len(everything) == len(wanted) + 9
  assert "~$Lease.docx" not in everything
  modules = tmp_path / "app" / "node_modules"
  assert names(modules) == ["x/readme.md"]  # What is itself given is read.
  assert names(tmp_path / "app/**/*.md") == []


def test_hostile_gitignore_files_exclude_nothing_and_cost_little(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(exclusions, "_MATCH_SECONDS", 0.01)
  name = "a" * 200 + ".md"
  write(tmp_path, f"slow/{name}", f"slow/b{name}", "large/a.md", "link/a.md")
  (tmp_path / "slow/.gitignore").write_text("*a" * 40 + "[bc]\n")
  (tmp_path / "large/.gitignore").write_text("a.md\n" * (1 << 18))
  write(tmp_path, "lines", text="a.md\n")
  (tmp_path / "link/.gitignore").symlink_to(tmp_path / "lines")
  os.mkfifo(tmp_path / ".gitignore")
  started = time.monotonic()
  result = found(tmp_path)
  assert time.monotonic() - started < 10
  assert len(result.files) == 4
  large, slow = sorted(result.refused)
  assert large[1] == "has more than 256 kB, so it excludes nothing"
  assert slow[1] == "takes too long to match, so it excludes nothing"
