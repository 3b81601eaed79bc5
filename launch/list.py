"""Lists systems, plug-ins, environments, retrievers and settings.

    anysearch list              # all but the settings
    anysearch list settings     # every one: default, range, kind, meaning

With the names of sections it prints only these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from absl import app

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import parts, shipped

CONFIG = config_lib.ExperimentConfig()
# Flags that set more than the setting, or less of it.
_SHORT = {
  "method.name": "--method",
  "reward.function": "--reward",
  "search.tools": "--config.search.tools=TOOL",
  "agents.program": "--agents",
}


def define_flags() -> None:
  """Defines no flag: the command has none."""


def main(argv: Sequence[str]) -> None:
  sections = {
    "systems": _systems,
    "plug-ins": _plug_ins,
    "environments": _environments,
    "retrievers": lambda: [
      setting.sentence
      for setting in config_settings.listed(CONFIG.retrieval)
      if setting.path == "kind"
    ],
    "settings": lambda: [launch_flags.help_text(CONFIG, "the paper")],
  }
  unknown = [name for name in argv[1:] if name not in sections]
  if unknown:
    raise app.UsageError(
      f"Found {unknown[0]!r}, expected some of {', '.join(sections)}."
    )
  for name in argv[1:] or list(sections)[:-1]:
    print(f"{name}:")
    for line in sections[name]():
      print(f"  {line}")
    print()
  if not argv[1:]:
    print("One of your own is `module:NAME` or `path/to/file.py:NAME`:")
    for setting, meaning in parts.OWN.items():
      print(f"  {_SHORT.get(setting, f'--config.{setting}')}: {meaning}")
    print(
      "  --scripted: a function (config, source), which returns an engine and "
      "its codec"
    )


def _systems() -> Iterator[str]:
  from anysearch_jax.methods import systems

  for name, system in systems.METHODS.items():
    kind = "trained" if system.reward else "not trained"
    yield f"{name:20}{kind}; prompts {', '.join(system.environments)}"


def _plug_ins() -> Iterator[str]:
  """Yields what `--method` takes of the files of a checkout."""
  for folder in ("examples", "research/methods"):
    for path in sorted((shipped.ROOT / folder).glob("*.py")):
      if "\nMETHOD = " in path.read_text("utf-8"):
        yield f"--method={folder}/{path.name}:METHOD"


def _environments() -> Iterator[str]:
  from anysearch_jax.methods import systems

  for name, environment in systems.ENVIRONMENTS.items():
    tools = ", ".join(tool.name for tool in environment.tools)
    yield f"{name:20}tools {tools}"


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, arguments="[SECTION...]")
