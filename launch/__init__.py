"""The commands: flags, build the parts, call the library."""

import importlib.util
import os
import sys

# transformers says once a process that it found no torch. Only tests use torch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# `python -m launch.X` imports this file first, with "-m" in the place of the
# command's name. Another Python than the environment's would end in a traceback
# about the first package that it lacks.
if sys.argv[:1] == ["-m"] and not importlib.util.find_spec("absl"):
  sys.exit(
    f"launch: {sys.executable} lacks the packages of requirements.txt. Run "
    "`make setup` in the root of the repository, then `. .venv/bin/activate`, "
    "and the same command again."
  )
