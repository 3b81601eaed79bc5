"""Systems of the literature as plug-ins, each a file with a `METHOD`.

    python -m launch.train --config=configs/quickstart.py \
        --method=research/methods/otc.py:METHOD
    python -m launch.train --config=research/methods/configs.py:otc

They use the public API only, as a system of a reader's own would. `control` and
`early_answers` are steps of an episode that several of them could have.
"""

from __future__ import annotations

import anysearch_jax as aj

# The systems that docs/methods.md compares with the shipped ones.
COMPARED = (
  "otc",
  "ikea",
  "research",
  "autorefine",
  "mt_grpo",
  "r1_searcher",
  "ssrl",
  "hiprag",
  "beta_grpo",
  "saas",
  "bavt",
  "autosearch",
  "slimsearcher",
  "igpo",
)


def method_name(system: str) -> str:
  """Returns the value of `method.name` that selects a system.

  `system` is the name of a plug-in, such as `otc`, or of a shipped system.
  """
  if system in (*COMPARED, "bats_verify", "brpo"):
    return f"research/methods/{system}.py:METHOD"
  return system


def prompts_name(system: str) -> str:
  """Returns the value of `episode.prompts` with a system's own words."""
  if system in (*COMPARED, "bats_verify"):
    return f"{method_name(system)}#{system}"
  return system


def wording(system: str) -> aj.wording.Wording:
  """Returns the words of a system; raises ValueError if it has no file."""
  words = aj.wording_of(prompts_name(system))
  if words is None:
    raise ValueError(
      f"Found no file with the words of {system!r}; expected a system that "
      "does not share those of another."
    )
  return words
