"""The commands: each reads flags, builds the parts and calls the library."""

import importlib.util
import os
import pathlib
import signal
import sys
import types

# transformers warns once per process that torch is missing; only tests use it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# It also warns of what our own checks of config.json refuse or allow.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# Packages of extras besides [train], by the names that Python imports.
_EXTRAS = {
  "mcp": "serve",
  "protego": "web",
  "trafilatura": "web",
  "pymilvus": "milvus",
  "wandb": "wandb",
  "mlflow": "mlflow",
}


def _report_missing_package(
  kind: type[BaseException],
  error: BaseException,
  traceback: types.TracebackType | None,
) -> None:
  """Ends a command whose package is not installed with a sentence."""
  if isinstance(error, ModuleNotFoundError):
    package = (error.name or "").partition(".")[0]
    if package not in ("", "anysearch_jax"):
      extra = _EXTRAS.get(package, "train")
      sys.stderr.write(
        f"anysearch: found no package {package!r}, which this command needs; "
        f"pip install 'anysearch_jax[{extra}]'\n"
      )
      return
  sys.__excepthook__(kind, error, traceback)


# `python -m launch.X` imports this file first, with "-m" in place of the
# command's name.
if sys.argv[:1] == ["-m"]:
  # Ctrl-C ends a command without a traceback until it hears signals.
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  sys.excepthook = _report_missing_package
  # Without this check, a Python from outside the environment ends with a
  # traceback about the first package that it lacks.
  if not importlib.util.find_spec("absl"):
    sys.exit(
      f"launch: {sys.executable} lacks the packages of requirements.txt. Run "
      "`make setup` in the root of the repository, then `. "
      ".venv/bin/activate`, and the same command again."
    )
  # `python -m` puts the current folder first. A folder that is not the project
  # may be a stranger's, so packages in it (a `configs`, a `jax_plugins`) are
  # imported only once the user names code of their own, and come last then.
  working_folder = os.getcwd()
  if not os.path.samefile(working_folder, pathlib.Path(__file__).parent.parent):
    sys.path[:] = [x for x in sys.path if x not in ("", working_folder)]
