"""Tests tools as values, and the retrievers that answer their calls."""

from __future__ import annotations

import asyncio
import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
import scripted

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import (
  prompts,
  protocol,
  records,
  scoring,
  spec,
  tools,
)
from anysearch_jax.launch import retrievers
from anysearch_jax.methods import systems
from anysearch_jax.retrieval import lexical
from anysearch_jax.rollout import searching, tool_retrievers

PAGE = (
  types.Passage("w/2", '"Emma"', "The second part."),
  types.Passage("w/10", '"Emma"', "The last part."),
  types.Passage("w/1", '"Emma"', "The first part."),
)
OTHER = types.Passage("w/3", '"Emma (film)"', "A film.")
READING = [PAGE[2], PAGE[0], PAGE[1]]


def ask(retriever, *requests):
  async def all_of_them():
    asked = (retriever.search(request) for request in requests)
    return await asyncio.gather(*asked)

  return asyncio.run(all_of_them())


def fetch(title, k=10, corpus=""):
  return types.SearchRequest(title, k, corpus, tool="fetch")


@pytest.mark.parametrize("title", ["Emma", '"Emma"', " emma ", "w/1"])
def test_page_is_all_its_passages_in_reading_order(title):
  hits = {title: (OTHER, *PAGE)}
  expected = READING[:1] if title == "w/1" else READING
  (found,) = ask(
    tool_retrievers.PageRetriever(scripted.Retriever(hits)), fetch(title)
  )
  assert found == expected
  (two,) = ask(
    tool_retrievers.PageRetriever(scripted.Retriever(hits)), fetch(title, 2)
  )
  assert two == expected[:2]


def test_each_call_is_answered_by_its_tool_and_cached_apart():
  search = scripted.Retriever({"Emma": (OTHER,)})
  pages = scripted.Retriever({"Emma": PAGE})
  box = searching.BatchingRetriever(
    tool_retrievers.Toolbox({"search": search, "fetch": pages}),
    config_lib.SearchConfig(),
  )
  asked = types.SearchRequest("Emma", 3)
  assert ask(box, asked, fetch("Emma", 3), asked) == [(OTHER,), PAGE, (OTHER,)]
  assert [r.tool for r in search.requests + pages.requests] == [
    "search",
    "fetch",
  ]
  # One tool that fails leaves the other.
  down = scripted.Retriever(error=types.RetrievalError("down"))
  box = tool_retrievers.Toolbox({"search": down, "fetch": pages})
  with pytest.raises(types.RetrievalError, match="down"):
    ask(box, asked)
  assert ask(box, fetch("Emma", 3)) == [PAGE]


def test_unknown_tools_and_answers_of_one_episode_are_refused():
  class Simulated(scripted.Retriever):
    def context_key(self, context):
      return context.turn

  with pytest.raises(ValueError, match="'fetch', expected one of search"):
    ask(tool_retrievers.Toolbox({"search": scripted.Retriever()}), fetch("a"))
  with pytest.raises(ValueError, match="Simulated for the tool 'search'"):
    tool_retrievers.Toolbox({"search": Simulated()})


def test_a_configuration_with_fetch_gets_a_retriever_of_pages():
  own = lexical.LexicalRetriever({"": (OTHER, *PAGE)})
  config = config_lib.ExperimentConfig()
  episode = dataclasses.replace(config.episode, prompts="paper_fetch")
  made = retrievers.make(dataclasses.replace(config, episode=episode), own)
  assert ask(made, fetch("Emma")) == [READING]
  identity = made.identity()
  assert identity["tools"]["search"] == own.identity()
  assert identity["tools"]["fetch"]["kind"] == "pages"
  other = lexical.LexicalRetriever({"": (OTHER,)})
  again = retrievers.make(dataclasses.replace(config, episode=episode), other)
  assert again.identity()["sha256"] != identity["sha256"]


SHOWN = (
  types.Observation("search", "a", 0, (OTHER, PAGE[0])),
  types.Observation("fetch", "Emma", 1, PAGE),
  types.Observation(
    "search",
    "b",
    2,
    (
      types.Passage("https://a.example/x?y=1", '"A Page"', "t"),
      types.Passage("w/2", '"Emma"', "t"),
      types.Passage("http://7.example/", '"7"', "t"),
    ),
  ),
)


@pytest.mark.parametrize(
  ("argument", "expected"),
  [
    ("1", "https://a.example/x?y=1"),
    (" Doc 1 ", "https://a.example/x?y=1"),
    ("[1]", "https://a.example/x?y=1"),
    ("#2", '"Emma"'),  # All passages of a page have its title.
    ("result 3", "http://7.example/"),
    ("a  page", "https://a.example/x?y=1"),
    ("Emma", "Emma"),
    ("7", "http://7.example/"),  # A title, before a number.
    ("0", "0"),
    ("4", "4"),
    ("Doc", "Doc"),
    ("1984", "1984"),
    ("https://b.example/", "https://b.example/"),
  ],
)
def test_a_page_is_named_by_a_number_or_a_title_of_the_last_search(
  argument, expected
):
  assert tools.FETCH.target(argument, SHOWN) == expected
  assert tools.FETCH.target(argument, ()) == argument
  assert tools.SEARCH.target is None  # It is asked for the argument.


def test_records_tell_the_tool_of_each_call():
  found = scripted.Retriever({"who": PAGE[:1], '"Emma"': PAGE})
  box = tool_retrievers.Toolbox(
    {"search": found, "fetch": tool_retrievers.PageRetriever(found)}
  )
  turns = (
    scripted.search("who"),
    "<think>open</think><fetch>1</fetch>",  # The first result's page.
    scripted.answer("x"),
  )
  played = scripted.play(
    scripted.Engine(turns),
    box,
    config_lib.EpisodeConfig(prompts="paper_fetch"),
    budget=3,
  )
  assert systems.environment("paper_fetch").judge(played).format == 1
  record = records.trajectory(played)
  assert record["searches"] == 2 and record["queries"] == ["who", '"Emma"']
  assert [(o["tool"], o["turn"]) for o in record["observations"]] == [
    ("search", 0),
    ("fetch", 1),
  ]
  texts = [p["text"] for p in record["observations"][1]["passages"]]
  assert texts == [passage.text for passage in READING]
  assert records.observations(record["observations"]) == played.observations


def test_the_last_complete_call_or_answer_is_read():
  read = tools.action((tools.SEARCH, tools.FETCH))
  call = protocol.ActionKind.SEARCH
  for text, expected in (
    ("<fetch> Emma </fetch>", protocol.Action(call, "Emma", "fetch")),
    ("<search>a</search><fetch>b</fetch>", protocol.Action(call, "b", "fetch")),
    ("<fetch>b</fetch><search>a</search>", protocol.Action(call, "a")),
    (
      "<fetch>b</fetch><answer>c</answer>",
      protocol.Action(protocol.ActionKind.ANSWER, "c"),
    ),
    ("<fetch>b", None),
  ):
    assert read(text) == expected
  # The paper's environment knows no page.
  assert protocol.last_action("<fetch>b</fetch>") is None


def test_an_environment_refuses_tools_whose_calls_do_not_end_a_turn():
  lines = dict(scaffold="", plain="", over_budget="", no_action="")
  env = spec.Environment(**lines)
  both = env.with_tools(tools.FETCH)
  assert both.stops == ("</search>", "</fetch>", "</answer>")
  assert both.all_markers == tools.FETCH.markers
  assert both.tool("fetch") is tools.FETCH
  with pytest.raises(ValueError, match="'</fetch>' too"):
    spec.Environment(**lines, tools=(tools.SEARCH, tools.FETCH))
  with pytest.raises(ValueError, match="each once"):
    env.with_tools(tools.SEARCH)
  with pytest.raises(ValueError, match="no tool 'fetch'; expected .* search"):
    env.tool("fetch")


SPOKEN = (
  (types.Author.MODEL, "<think>t</think><search>q</search>"),
  (types.Author.ENVIRONMENT, "<information>d</information>"),
  (types.Author.MODEL, "<think>t</think><fetch>p</fetch>"),
  (types.Author.ENVIRONMENT, "<page>d</page>"),
  (types.Author.MODEL, "<think>t</think><answer>a</answer>"),
)


@pytest.mark.parametrize(
  ("changed", "calls", "searches", "expected"),
  [
    ({}, {"fetch": "page"}, 2, 1),
    ({}, None, 2, 0),  # The paper's grammar has no page.
    ({}, None, 1, 0),
    ({}, {"fetch": "page"}, 1, 0),
    ({3: "<information>d</information>"}, {"fetch": "page"}, 2, 0),
    ({2: "<think>t</think><fetch>p</fetch> so"}, {"fetch": "page"}, 2, 0),
  ],
)
def test_format_with_pages_by_hand(changed, calls, searches, expected):
  spans = [
    types.Span(author, changed.get(place, text))
    for place, (author, text) in enumerate(SPOKEN)
  ]
  found = scoring.check_format(
    spans, budget=2, searches=searches, scaffold=False, calls=calls
  )
  assert found == expected


def think(action):
  return f"<think> x ; </think> {action}"


CHEAP = think("<cheap> a b </cheap>")
DEAR = think("<search> a b </search>")
SAID = think("<answer> c </answer>")


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  st.lists(
    st.sampled_from([CHEAP, DEAR, "Hm.", think("<cheap> </cheap>")]),
    max_size=14,
  ),
  st.integers(1, 20),
  st.lists(st.tuples(st.text(max_size=9), st.text(max_size=30)), max_size=3),
)
def test_calls_are_charged_by_their_tool_to_the_last_cent(turns, cents, shown):
  """Whatever the retriever returns."""
  env = prompts.PROMPTS["world"].with_tools(
    tools.Tool("cheap", "<cheap>", "</cheap>", price=10.0)
  )
  found = scripted.Retriever(
    {"a b": tuple(types.Passage("i", *each) for each in shown)}
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(systems.ENVIRONMENTS, "two_prices", env)
    found = scripted.play(
      scripted.Engine([*turns, *[SAID] * 20]),
      tool_retrievers.Toolbox({"search": found, "cheap": found}),
      config_lib.EpisodeConfig(prompts="two_prices"),
      budget=budgets.Budget(
        dollars=cents / 100, prices=budgets.Prices(search=30.0)
      ),
    )
  made = [each.tool for each in found.observations]
  cost = sum({"cheap": 1, "search": 3}[tool] for tool in made)
  assert cost <= cents
  assert records.dollars(found) <= cents / 100
  assert records.dollars(found) == pytest.approx(cost / 100, abs=1e-15)
  assert budgets.from_record(found.caps.record()) == found.caps
  # What was affordable was carried out.
  left, expected, bad = cents, [], 0
  for text in turns:
    price = {CHEAP: 1, DEAR: 3}.get(text)
    if price is None or price > left:
      bad += 1
      if bad > 2:
        break
      continue
    left -= price
    expected.append("cheap" if price == 1 else "search")
  assert made == expected
