"""The commands: each reads flags, builds the parts and calls the library."""

import importlib.util
import os
import pathlib
import signal
import sys

# transformers warns once per process that torch is missing; only tests use it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# It also warns of what our own checks of config.json refuse or allow.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# `python -m launch.X` imports this file first, with "-m" in place of the
# command's name.
if sys.argv[:1] == ["-m"]:
  # Ctrl-C ends a command without a traceback until it hears signals.
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  # Without this check, a Python from outside the environment ends with a
  # traceback about the first package that it lacks.
  if not importlib.util.find_spec("absl"):
    sys.exit(
      f"launch: {sys.executable} lacks the packages of requirements.txt. Run "
      "`make setup` in the root of the repository, then `. "
      ".venv/bin/activate`, and the same command again."
    )
  # `python -m` puts the current folder first. A user's folder comes last
  # instead, so that packages in it (a `configs`, a `retrieval`) do not replace
  # ours, and what it names, such as `--reward=my_rewards:reward`, is found.
  working_folder = os.getcwd()
  if not os.path.samefile(working_folder, pathlib.Path(__file__).parent.parent):
    kept_paths = [x for x in sys.path if x not in ("", working_folder)]
    sys.path[:] = [*kept_paths, working_folder]
