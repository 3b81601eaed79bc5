"""Data is never executed: no remote code, no module that a file names.

The linter's rules S (pyproject.toml) refuse pickles, `eval` and shells; this
reads off the source what they do not know.
"""

from __future__ import annotations

import re

import source_tree

# A configuration file is the Python that it is, and so is what --scripted and
# --reward name; all else that comes from outside is data.
_ALLOWED = {
  # A name of its own table.
  "anysearch_jax/__init__.py": {"importlib.import_module"},
  # What a user names.
  "anysearch_jax/host/plugins.py": {"importlib.import_module", "exec("},
}
_UNSAFE = re.compile(
  r"(?:allow_pickle|trust_remote_code)=(?!False)"
  r"|[\w.]*\b(?:import_module|exec_module|load_module|run_path|run_module"
  r"|__import__|unpack_archive|extractall|mktemp)\b"
  r"|torch\.load|\bexec\("
)


# Who makes settings of stored values, which may name code. An agent refuses
# such names (`plugins.require_named`); an export uses sizes and paths only; a
# key has no such setting; `flags` reads what the caller's own file returned.
_SETTINGS_READERS = {
  "anysearch_jax/agent/loading.py",
  "anysearch_jax/config/settings.py",
  "anysearch_jax/export/hf_export.py",
  "launch/flags.py",
  "anysearch_jax/serving/keys.py",
}


def test_whoever_reads_stored_settings_is_listed():
  readers = {
    path.relative_to(source_tree.ROOT).as_posix()
    for path in source_tree.files()
    if re.search(r"\bfrom_dict\(", path.read_text())
  }
  assert readers == _SETTINGS_READERS


def test_nothing_that_is_read_is_run():
  found = {
    path.relative_to(source_tree.ROOT).as_posix(): names
    for path in source_tree.files()
    if (names := set(_UNSAFE.findall(path.read_text())))
  }
  assert found == _ALLOWED
