"""Search-R1: an outcome reward, a fixed budget, GRPO or PPO.

Its tags are those of the AnySearch paper. Its prompt is the released one, with
the number of searches in place of "as many times as you want", because the
comparison tells every system its budget.

Deviations from the released code, which has its own episode loop:
- A turn ends at its closing tag; there, it is cut at the tag afterwards.
- Observations are not cut at 500 tokens.
- A search beyond the budget gets a line and another turn; there, nothing is
  shown and the episode ends.
- A turn without an action does not use up the budget; an empty query is not an
  action.
"""
# ruff: noqa: E501 - prompts are not wrapped: they are sent exactly as written.

from __future__ import annotations

from anysearch_jax.environment import environment, prompts
from anysearch_jax.methods import method, search_r1_reward

_PROMPT = """\
Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query </search> and it will return the top searched results between <information> and </information>. You can search at most {B} times. If you find no further external knowledge needed, you can directly provide the answer inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {Question}
"""

SEARCH_R1 = environment.Environment(
  scaffold=_PROMPT,
  plain=_PROMPT,
  over_budget=(
    "\nNo search is left. I should give the final answer between the answer "
    "tags now.\n"
  ),
  no_action=(
    "\nMy previous action is invalid. If I want to search, I should put the "
    "query between the search tags. If I want to give the final answer, I "
    "should put the answer between the answer tags. Let me try again.\n"
  ),
)
ENVIRONMENTS = {
  "search_r1": SEARCH_R1,
  "search_r1_world": prompts.PROMPTS["world"],
}


METHOD = method.Method(
  "search_r1",
  "Search-R1",
  environments=ENVIRONMENTS,
  reward=method.by_own_constants(search_r1_reward.reward, "search_r1"),
  train=method.fixed_budget,
  measures=("gold_found",),
  measure=search_r1_reward.measure,
)
