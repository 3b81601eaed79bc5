"""The prompts and error lines of the paper and of the generated world.

`{B}` and `{Question}` are placeholders for the budget and the question.
"""
# ruff: noqa: E501 - the paper's prompts are kept as printed, line by line.

from __future__ import annotations

import re

from anysearch_jax.environment import spec

# Verbatim from the paper's appendix "Prompt Design".
_PAPER_SCAFFOLD = """\
You are an expert assistant designed to solve complex tasks through a rigorous cycle of reasoning and search. Your goal is to answer the user's question accurately while efficiently using your search budget. You have a total of {B} searches available. You must execute a structured loop of Budget, Reasoning, Action, Observation until you have sufficient information to answer.

1. Budget Phase (`<budget>`)
Before each reasoning step, you will see the current search budget:
<budget>remaining=R; used=U; total=T</budget>
The remaining is the number of searches you can still perform, used is the number of searches you have already performed, and total is the total budget allocated. Note that remaining + used = total.
You must consider the current budget state before deciding any action.

2. Reasoning Phase (`<think>`)
Before taking any action or providing an answer, you must output a reasoning block. Inside `<think>...</think>`, you are required to explicitly analyze:
Information Sufficiency: Is the current information adequate for producing a reliable answer? What specific information is still missing?
Budget Strategy: Analyze the current budget state (`<budget>`). Determine whether the next search is necessary and worthwhile given remaining resources. Prioritize using your internal knowledge when possible, and reserve search budget for information that is clearly beyond your parametric knowledge.

3. Search Phase (`<search>`)
If additional information is needed, invoke the search engine:
<search>query</search>
Cost: 1 unit of budget per search.
Usage: Use this when you need specific factual information that you cannot reliably produce from internal knowledge alone.

4. Observation Phase (`<information>`)
The system will return search results wrapped in `<information>...</information>` tags.

5. Answering Phase (`<answer>`)
Once you have gathered sufficient information and no further searching is required, provide the final concise answer wrapped in `<answer>...</answer>` tags. For example: <answer> Beijing </answer>

Now, answer the following question:
{Question}"""

_PAPER_PLAIN = """\
You are an expert assistant designed to solve complex tasks through reasoning and search. Your goal is to answer the user's question accurately. You have a total of {B} searches available. You must execute a loop of Reasoning, Action, Observation until you have sufficient information to answer.

1. Reasoning Phase (`<think>`)
Before taking any action or providing an answer, you must output a reasoning block inside `<think>...</think>` tags.

2. Search Phase (`<search>`)
If additional information is needed, invoke the search engine:
<search>query</search>
Cost: 1 unit of budget per search.

3. Observation Phase (`<information>`)
The system will return search results wrapped in `<information>...</information>` tags.

4. Answering Phase (`<answer>`)
Once you have gathered sufficient information and no further searching is required, provide the final concise answer wrapped in `<answer>...</answer>` tags. For example: <answer> Beijing </answer>

Now, answer the following question:
{Question}"""

PROMPTS = {
  "paper": spec.Environment(
    scaffold=_PAPER_SCAFFOLD,
    plain=_PAPER_PLAIN,
    over_budget=(
      "\nNo search is left. Give the final answer now, between answer tags.\n"
    ),
    no_action=(
      "\nNeither a search nor an answer was found. Write a query between "
      "search tags if a search is left, or the final answer between answer "
      "tags.\n"
    ),
  ),
  # Short prompts, because the generated world's tokenizer has one token per
  # word and a small vocabulary.
  "world": spec.Environment(
    scaffold="guide budget {B} question {Question}",
    plain="budget {B} question {Question}",
    over_budget="no budget ; answer now\n",
    no_action="search or answer\n",
  ),
}

_SLOT = re.compile(r"\{(?:B|Question)\}")


def render(template: str, *, budget: int, question: str) -> str:
  """Fills a prompt in one pass, so that a question may itself contain `{B}`.

  Args:
    template: `scaffold` or `plain` of a `spec.Environment`.
    budget: searches assigned to the episode, >= 0.
    question: the question, already neutralised.

  Returns:
    The content of the user message.

  Raises:
    ValueError: the budget is negative.
  """
  if budget < 0:
    raise ValueError(
      f"Found a budget of {budget} searches; expected 0 or more (0 is to "
      "answer without a search)."
    )
  values = {"{B}": str(budget), "{Question}": question}
  return _SLOT.sub(lambda match: values[match[0]], template)
