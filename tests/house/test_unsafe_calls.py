"""Data is never executed: no pickle, no remote code, no text as a program.

Read off the source. A configuration file is the Python that it is, and so is
what --scripted and --reward name; all else that comes from outside is data.
"""

from __future__ import annotations

import ast

import pytest
import source_tree

# Modules whose files or bytes run code when they are read.
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"} | {
  "joblib",
  "jsonpickle",
}
# Calls by their whole name.
_CALLS = {"eval", "exec", "compile", "__import__"} | {
  *("os.system", "os.popen", "tempfile.mktemp"),
  *("torch.load", "pd.read_pickle", "pandas.read_pickle"),
  *("yaml.load", "yaml.unsafe_load", "yaml.full_load"),
  *("importlib.import_module", "runpy.run_path", "runpy.run_module"),
  "shutil.unpack_archive",
}
# By their last name: archives choose their own paths; modules run.
_METHODS = {"extractall", "exec_module", "load_module"}
# Arguments that must be False where they stand.
_NEVER = {"allow_pickle", "trust_remote_code", "shell"}

# What stands there on purpose, by file and text, with the reason.
_ALLOWED = {
  (
    "anysearch_jax/__init__.py",
    "importlib.import_module",
  ): "a name of its own table",
  (
    "anysearch_jax/host/plugins.py",
    "importlib.import_module",
  ): "what a user names",
  (
    "anysearch_jax/host/plugins.py",
    "loader.exec_module",
  ): "what a user names",
}


def _is_unsafe(node: ast.AST) -> bool:
  if isinstance(node, ast.Import):
    return any(a.name.partition(".")[0] in _MODULES for a in node.names)
  if isinstance(node, ast.ImportFrom):
    return (node.module or "").partition(".")[0] in _MODULES
  if not isinstance(node, ast.Call):
    return False
  name = ast.unparse(node.func)
  return (
    name in _CALLS
    or ("." in name and name.rpartition(".")[2] in _METHODS)
    or any(
      (k.arg in _NEVER and not _is(k.value, False))
      or (k.arg == "verify" and _is(k.value, False))
      or (k.arg == "host" and _is(k.value, "0.0.0.0"))
      for k in node.keywords
    )
  )


def _is(node: ast.AST, value: object) -> bool:
  return isinstance(node, ast.Constant) and node.value == value


def unsafe(places) -> list[source_tree.Place]:
  """Returns the calls that may execute data or open the machine to others."""
  return [place for place, node, _ in places if _is_unsafe(node)]


def test_nothing_that_is_read_is_run():
  found = unsafe(source_tree.all_nodes())
  entries = {
    (place.file, text)
    for place in found
    for file, text in _ALLOWED
    if place.file == file and place.text.startswith(text)
  }
  unknown = [
    str(place)
    for place in found
    if not any(
      place.file == file and place.text.startswith(text)
      for file, text in _ALLOWED
    )
  ]
  assert not unknown
  assert entries == set(_ALLOWED), "an entry that allows nothing"


@pytest.mark.parametrize(
  "line",
  [
    "import pickle",
    "from pickle import loads",
    "import dill as d",
    "x = eval(text)",
    "exec(text)",
    "x = np.load(path, allow_pickle=True)",
    "x = np.load(path, allow_pickle=chosen)",
    "x = AutoModel.from_pretrained(name, trust_remote_code=True)",
    "x = yaml.load(text)",
    "x = torch.load(path)",
    "os.system(text)",
    "x = subprocess.run(text, shell=True)",
    "archive.extractall(folder)",
    "x = importlib.import_module(name)",
    "x = httpx2.get(url, verify=False)",
    "uvicorn.run(app, host='0.0.0.0')",
  ],
)
def test_unsafe_call_is_found(line):
  assert unsafe(source_tree.nodes(line))


@pytest.mark.parametrize(
  "line",
  [
    "x = np.load(path)",
    "x = np.load(path, allow_pickle=False)",
    "x = yaml.safe_load(text)",
    "x = ast.literal_eval(text)",
    "x = re.compile(text)",
    "x = subprocess.run(['ls'], timeout=1)",
    "x = tokenizer.from_pretrained(folder, local_files_only=True)",
    "uvicorn.run(app, host='127.0.0.1')",
  ],
)
def test_safe_call_is_not_reported(line):
  assert not unsafe(source_tree.nodes(line))
