"""What is searched, by what the model remembers."""

from __future__ import annotations

import pytest
import study

from research import first_facts


def test_knowledge_of_a_policy_that_searches_what_it_lacks():
  row = study.row("a", questions=80, thrift=0.1)
  found = first_facts.knowledge(row.episodes)
  rates = {name: rate for name, (rate, _) in found.items()}
  assert rates["known"].value < 0.2 < 0.9 < rates["unknown"].value
  assert rates["gap"].above()
  assert found["stale"][1] > 0
  plain = study.row("a", questions=3, plain=True)
  assert first_facts.knowledge(plain.episodes) == {}


_FACT = {
  "entity": "kelmar",
  "relation": "birthplace",
  "alternative": "born in",
  "value": "tol",
  "known": True,
  "stale": False,
}


@pytest.mark.parametrize(
  ("budget", "queries", "fact", "found"),
  [
    (1, ["kelmar born in"], {}, ("known", True)),
    (1, ["Where was Kelmar born in?"], {}, ("known", True)),
    # Whole words of the entity and of either wording.
    (1, ["kelmarine birthplace", "birthplace"], {}, ("known", False)),
    (1, ["kelmar"], {"alternative": ""}, ("known", False)),
    (1, ["kelmar country"], {"known": False}, ("unknown", False)),
    (2, ["tol", "kelmar birthplace"], {"stale": True}, ("stale", True)),
    (0, [], {}, None),
  ],
)
def test_first_hop_sorts_by_memory_and_needs_budget(
  budget, queries, fact, found
):
  facts = {"facts": [_FACT | fact, _FACT]}
  (episode,) = study.row("a", questions=1, budgets=(1,)).episodes
  episode |= {"budget": budget, "queries": queries, "metadata": facts}
  assert first_facts.first_hop(episode) == found
  assert first_facts.first_hop(episode | {"metadata": {}}) is None
