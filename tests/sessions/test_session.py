"""A session: tokens, masks, segments and the budget, by a scripted engine."""

import asyncio
import dataclasses
from collections import Counter

import numpy as np
import pytest
import scripted

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver
from anysearch_jax.sessions import session as session_lib
from anysearch_jax.sessions import turns

SEARCH = {"name": "search", "description": "", "parameters": {}}
LAND = systems.of_episode(
  config_lib.EpisodeConfig(prompts="program")
).over_budget
ASKED = turns.Message("user", "Q?")


class Codec(scripted.Codec):
  """The character tokenizer with a chat template."""

  def render_messages(self, messages, tools=()):
    marks = {"user": scripted.USER, "assistant": scripted.ASSISTANT}
    parts = [f"[{tool['function']['name']}]" for tool in tools]
    for message in messages:
      mark = marks.get(message["role"], message["role"] + ":")
      calls = "".join(
        call["function"]["name"] + str(call["function"]["arguments"])
        for call in message.get("tool_calls", ())
      )
      parts.append(f"{mark}{message['content']}{calls}{scripted.END}")
    return "".join(parts) + scripted.ASSISTANT

  def encode_prompt(self, text):
    return self.encode(text)

  def transcript(self, ids):
    names = {self.encode(token)[0]: token for token in self.control_tokens}
    return "".join(names.get(i) or self.decode([i]) for i in ids)


CODEC = Codec()


def call(query: str) -> str:
  return f'<tool_call>{{"name": "search", "arguments": {{"q": "{query}"}}}}'


def opened(texts, *, budget=2, engine=None, config=None, limits=None, **agents):
  """Returns a session whose policy writes these texts, and its engine."""
  engine = engine or scripted.Engine(texts)
  limits = limits or config_lib.EpisodeConfig(
    prompts="program", max_context=2000, max_generated=1000
  )
  agents.setdefault("states_budget", False)
  one = session_lib.Session(
    scripted.QUESTION,
    parts=driver.EpisodeParts(
      engine,
      scripted.Retriever(),
      limits,
      CODEC,
      systems.of_episode(limits),
      trains=True,
    ),
    codec=CODEC,
    budget=budgets.of(budget),
    scaffold=False,
    address=types.Address(0, 0, 0),
    config=config_lib.AgentsConfig(**agents),
    sampling={"temperature": 1.0},
    counters=Counter(),
  )
  return one, engine


def asked(*messages, tools=(SEARCH,), **fields):
  return turns.TurnRequest(messages, tools=tools, **fields)


def played(steps, texts, **settings):
  """Runs `steps(session)` in the loop; returns session, engine, trajectory."""

  async def run():
    one, engine = opened(texts, **settings)
    await steps(one)
    return one, engine, one.trajectory()

  return loop.run(run())


def by_author(t, author):
  """Returns the text of the tokens of one author."""
  return CODEC.transcript(t.token_ids[t.authors == author].tolist())


def test_two_turns_are_one_segment_of_the_tokens_that_were_sampled():
  async def steps(one):
    first = await one.turn(asked(ASKED))
    assert first.message.content == ""
    assert [c.arguments for c in first.message.calls] == ['{"q": "a"}']
    found = turns.Message("tool", "found", call_id=first.message.calls[0].id)
    second = await one.turn(asked(ASKED, first.message, found))
    assert second.message == turns.Message("assistant", "x")
    assert one.budget_headers() == {"x-budget": "2", "x-budget-left": "1"}

  one, engine, t = played(steps, [call("a"), "x"])
  first = call("a") + scripted.END
  between = f"tool:found{scripted.END}{scripted.ASSISTANT}"
  assert CODEC.transcript(t.token_ids.tolist()) == (
    f"[search]{scripted.USER}Q?{scripted.END}{scripted.ASSISTANT}"
    f"{first}{between}x{scripted.END}"
  )
  assert by_author(t, types.Author.MODEL) == f"{first}x{scripted.END}"
  assert by_author(t, types.Author.ENVIRONMENT) == between
  # The scripted engine gives turn k the version k + 7.
  model = t.authors == types.Author.MODEL
  assert t.versions[model].tolist() == [7] * len(CODEC.encode(first)) + [8, 8]
  assert np.all(t.logps[~model] == 0) and np.all(t.logps[model] < 0)
  assert t.segment_starts == (0,)
  assert (t.searches, t.queries) == (1, ('{"q": "a"}',))
  assert t.outcome is types.Outcome.ANSWERED
  assert engine.requests[1].token_ids[: len(engine.requests[0].token_ids)] == (
    engine.requests[0].token_ids
  )
  assert one.reason == "" and engine.released


def test_a_rewritten_history_begins_a_segment_of_its_own():
  async def steps(one):
    await one.turn(asked(ASKED))
    await one.turn(asked(turns.Message("user", "shorter")))
    assert one._counters["forks"] == 1

  _, _, t = played(steps, ["one", "two"])
  assert len(t.segment_starts) == 2
  second = t.token_ids[t.segment_starts[1] :].tolist()
  assert CODEC.transcript(second).startswith(f"[search]{scripted.USER}shorter")
  assert (
    by_author(t, types.Author.MODEL) == f"one{scripted.END}two{scripted.END}"
  )
  assert t.authors[t.segment_starts[1]] == types.Author.PROMPT
  assert [span.text for span in t.spans] == ["one", "two"]


def test_a_turn_that_is_asked_for_again_is_charged_and_not_trained_on():
  async def steps(one):
    await one.turn(asked(ASKED))
    again = await one.turn(asked(ASKED))
    assert again.message.content == "x"
    assert one._counters["turns_asked_again"] == 1
    assert not one._counters["forks"]
    assert one.budget_headers()["x-budget-left"] == "1"

  _, engine, t = played(steps, [call("a"), "x"])
  assert t.segment_starts == (0,) and t.generated_tokens == 2
  assert t.discarded_tokens == len(CODEC.encode(call("a"))) + 1
  assert (t.searches, t.queries) == (1, ())
  # The second sample is another one: its turn is part of its seed.
  assert [request.turn for request in engine.requests] == [0, 1]


def test_two_conversations_of_a_session_take_turns():
  async def steps(one):
    first = await one.turn(asked(ASKED))
    await one.turn(asked(turns.Message("user", "other")))
    more = turns.Message("user", "more")
    await one.turn(asked(ASKED, first.message, more))
    assert one._counters["forks"] == 1

  _, _, t = played(steps, ["one", "two", "three"])
  # The third turn continues the first, and its segment comes last.
  assert by_author(t, types.Author.MODEL) == (
    f"two{scripted.END}one{scripted.END}three{scripted.END}"
  )
  environment = systems.environment("program")
  assert environment.judge(t).answer == "three"


def test_a_search_beyond_the_budget_is_answered_by_a_request_to_land():
  async def steps(one):
    first = await one.turn(asked(ASKED))
    found = turns.Message("tool", "found", call_id="c")
    second = await one.turn(asked(ASKED, first.message, found))
    # The program sees the answer alone, and goes on from it.
    assert second.message == turns.Message("assistant", "late")
    more = turns.Message("user", "sure?")
    await one.turn(asked(ASKED, first.message, found, second.message, more))
    assert one._counters["landings"] == 1 and not one._counters["forks"]

  _, _, t = played(steps, [call("a"), call("b"), "late", "yes"], budget=1)
  assert t.segment_starts == (0,) and t.searches == 1 and t.violation
  assert by_author(t, types.Author.MODEL) == scripted.END.join(
    [call("a"), call("b"), "late", "yes", ""]
  )
  assert f"{scripted.USER}{LAND}{scripted.END}" in by_author(
    t, types.Author.ENVIRONMENT
  )


def test_a_second_search_beyond_the_budget_is_refused_as_a_spent_quota():
  async def steps(one):
    for _ in range(2):
      with pytest.raises(turns.RefusedError) as refused:
        await one.turn(asked(ASKED))
      error = refused.value
      assert (error.status, error.kind, error.code) == (
        429,
        "insufficient_quota",
        "budget_exhausted",
      )
      assert "budget of 0 calls of 'search'" in error.message

  _, engine, t = played(steps, [call("a"), call("b")], budget=0)
  assert len(engine.requests) == 2  # The second refusal samples nothing.
  assert t.violation and t.searches == 0
  assert by_author(t, types.Author.MODEL).count("tool_call") == 2


def test_calls_of_other_tools_cost_nothing():
  other = {**SEARCH, "name": "lookup"}

  async def steps(one):
    reply = await one.turn(asked(ASKED, tools=(SEARCH, other)))
    assert reply.message.calls[0].name == "lookup"

  text = call("a").replace("search", "lookup")
  _, _, t = played(steps, [text], budget=0)
  assert t.searches == 0 and not t.violation


def test_several_calls_of_a_turn_are_charged_together():
  async def steps(one):
    reply = await one.turn(asked(ASKED))
    assert len(reply.message.calls) == 2

  _, _, t = played(steps, [call("a") + call("b")])
  assert t.searches == 2


def test_a_turn_with_more_calls_than_the_budget_has_left_is_not_handed_out():
  async def steps(one):
    reply = await one.turn(asked(ASKED))
    assert reply.message == turns.Message("assistant", "x")

  _, _, t = played(steps, [call("a") + call("b"), "x"], budget=1)
  assert t.searches == 0 and t.violation


@pytest.mark.parametrize("cap", [40, 60])
def test_a_cap_on_tokens_lands_and_then_refuses(cap):
  async def steps(one):
    replies = []
    messages = [ASKED]
    with pytest.raises(turns.RefusedError) as refused:
      for _ in range(9):
        reply = await one.turn(asked(*messages))
        replies.append(reply)
        messages += [reply.message, turns.Message("user", "more")]
    assert refused.value.kind == "insufficient_quota"
    assert f"{cap} tokens of its budget" in refused.value.message
    assert one._counters["landings"] == 1

  budget = budgets.Budget(searches=3, tokens=cap)
  _, _, t = played(steps, ["nine char"] * 9, budget=budget)
  assert t.generated_tokens == cap
  assert LAND in by_author(t, types.Author.ENVIRONMENT)


def test_the_limit_on_the_context_counts_all_segments():
  limits = config_lib.EpisodeConfig(
    prompts="program", max_context=100, max_generated=1000
  )

  async def steps(one):
    with pytest.raises(turns.RefusedError) as refused:
      for number in range(4):
        await one.turn(asked(turns.Message("user", f"{number}" * 20)))
    assert "max_context" in refused.value.message

  _, _, t = played(steps, ["a" * 5] * 4, limits=limits)
  assert len(t.token_ids) <= 100
  # The program was refused and reported nothing: there is no answer.
  assert t.outcome is types.Outcome.TRUNCATED and t.reported_answer == ""


def test_a_budget_is_stated_in_one_system_message():
  async def steps(one):
    await one.turn(asked(turns.Message("system", "Be brief."), ASKED))

  _, engine, _ = played(
    steps, ["x"], budget=budgets.Budget(2, tokens=30), states_budget=True
  )
  text = CODEC.transcript(engine.requests[0].token_ids)
  assert text.startswith(
    "[search]system:Your budget: 2 calls of search, 30 tokens.\n\nBe brief."
  )


def test_control_tokens_of_a_tool_do_not_reach_the_policy():
  async def steps(one):
    await one.turn(asked(turns.Message("user", f"a{scripted.END}b")))

  _, engine, _ = played(steps, ["x"])
  # The template's own end of the message alone.
  assert engine.requests[0].token_ids.count(scripted.END_ID) == 1


def test_an_outcome_ends_the_session_and_a_second_one_spoils_it():
  async def steps(one):
    await one.turn(asked(ASKED))
    one.report(turns.Report(answer="x"))
    with pytest.raises(turns.RefusedError, match="after the outcome"):
      await one.turn(asked(ASKED))

  _, _, t = played(steps, ["y"])
  assert (t.reported_answer, t.outcome) == ("x", types.Outcome.ANSWERED)

  async def twice(one):
    await steps(one)
    with pytest.raises(turns.RefusedError, match="second outcome"):
      one.report(turns.Report(answer="y"))

  one, _, t = played(twice, ["y"])
  assert t.failed and "twice" in t.reason
  assert one._counters["spoiled_reported_twice"] == 1


def test_too_many_segments_spoil_a_session_and_too_many_turns_end_it():
  async def rewritten(one):
    await one.turn(asked(ASKED))
    with pytest.raises(turns.RefusedError, match="agents.segments=1"):
      await one.turn(asked(turns.Message("user", "new")))

  assert played(rewritten, ["a"] * 2, segments=1)[2].failed

  async def flooded(one):
    await one.turn(asked(ASKED))
    with pytest.raises(turns.RefusedError, match="had its 1 turns"):
      await one.turn(asked(ASKED))

  # The policy may be the one that does not end.
  t = played(flooded, ["a"] * 2, turns=1)[2]
  assert t.outcome is types.Outcome.TRUNCATED and "turns" in t.reason


def test_a_session_without_a_turn_is_of_no_use():
  async def steps(one):
    pass

  t = played(steps, [])[2]
  assert t.failed and "no turn" in t.reason


def test_ids_without_their_log_probabilities_are_dropped():
  class Short(scripted.Engine):
    async def generate(self, request):
      whole = await super().generate(request)
      return dataclasses.replace(whole, logps=whole.logps[:-1])

  async def steps(one):
    with pytest.raises(types.EngineError, match="log-probabilities"):
      await one.turn(asked(ASKED))

  one, _, t = played(steps, [], engine=Short(["abc"]))
  assert t.failed and len(t.token_ids) == 0
  assert one._counters["spoiled_mismatched"] == 1


def test_a_turn_beyond_its_limit_is_dropped():
  class Endless(scripted.Engine):
    async def generate(self, request):
      whole = dataclasses.replace(request, max_tokens=request.max_tokens + 1)
      return await super().generate(whole)

  async def steps(one):
    with pytest.raises(types.EngineError, match="1 to 2 tokens"):
      await one.turn(asked(ASKED, max_tokens=2))

  assert played(steps, [], engine=Endless(["abc"]))[2].failed


def test_the_prompt_of_a_turn_and_what_was_cached_of_it_are_told():
  async def steps(one):
    first = await one.turn(asked(ASKED))
    second = await one.turn(asked(ASKED, first.message, ASKED))
    assert (first.cached_tokens, first.written_tokens) == (0, 2)
    assert second.cached_tokens == first.prompt_tokens + 2

  played(steps, ["x", "y"])


def test_a_turn_whose_client_left_can_be_asked_for_again():
  async def steps(one):
    leaving = asyncio.ensure_future(one.turn(asked(ASKED)))
    await asyncio.sleep(0.01)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
      await leaving
    reply = await one.turn(asked(ASKED))
    assert reply.message.content == "x"

  engine = scripted.Engine(["x", "y"], seconds=lambda: 0.05)
  _, _, t = played(steps, [], engine=engine)
  assert t.segment_starts == (0,) and t.generated_tokens == 2


def test_turns_of_a_session_wait_for_each_other():
  async def steps(one):
    await asyncio.gather(*(one.turn(asked(ASKED)) for _ in range(3)))

  engine = scripted.Engine(["x", "y", "z"], seconds=lambda: 0.01)
  _, engine, _ = played(steps, [], engine=engine)
  assert engine.most == 1


def test_the_end_of_a_session_ends_its_running_turn():
  async def run():
    one, _ = opened([], engine=scripted.Engine(["x"], seconds=lambda: 60))
    waiting = asyncio.ensure_future(one.turn(asked(ASKED)))
    await asyncio.sleep(0.01)
    one.trajectory()
    with pytest.raises(turns.RefusedError, match="session ended"):
      await waiting

  loop.run(run())


def test_a_program_that_speaks_in_tags_makes_the_tokens_of_an_episode():
  """The quickstart's method, played from outside, is the same trajectory."""
  config = config_lib.EpisodeConfig(
    prompts="paper", max_context=4000, max_generated=1000
  )
  environment = systems.of_episode(config)
  passage = types.Passage("1", "T", "text")
  texts = [scripted.search("q"), scripted.answer("x")]
  retriever = scripted.Retriever({"q": [passage]})
  parts = driver.EpisodeParts(
    scripted.Engine(texts), retriever, config, CODEC, environment
  )
  address = types.Address(0, 0, 0)
  inside = loop.run(
    driver.run_episode(
      scripted.QUESTION, parts, budget=2, scaffold=True, address=address
    )
  )

  async def outside():
    engine = scripted.Engine(texts)
    one = session_lib.Session(
      scripted.QUESTION,
      parts=dataclasses.replace(parts, engine=engine),
      codec=CODEC,
      budget=budgets.of(2),
      scaffold=True,
      address=address,
      config=config_lib.AgentsConfig(states_budget=False),
      sampling={},
      counters=Counter(),
    )
    prompt = protocol.render(
      environment.scaffold, searches=2, question=scripted.QUESTION.text
    )
    messages = [
      turns.Message("user", prompt),
      turns.Message("user", environment.before_turn(2, 0)),
    ]
    for used in range(2):
      reply = await one.turn(turns.TurnRequest(tuple(messages)))
      observation = environment.tool("search").observation([passage], ())
      shown = observation + environment.before_turn(2, used + 1)
      messages += [reply.message, turns.Message("user", shown)]
    return one.trajectory()

  t = loop.run(outside())
  np.testing.assert_array_equal(t.token_ids, inside.token_ids)
  np.testing.assert_array_equal(t.logps, inside.logps)
  model = types.Author.MODEL
  np.testing.assert_array_equal(t.authors == model, inside.authors == model)
  assert (t.searches, t.queries) == (inside.searches, inside.queries)
  assert environment.judge(t).answer == environment.judge(inside).answer


def test_the_chosen_of_two_samples_is_trained_on():
  async def steps(one):
    first = await one.turn(asked(ASKED))
    await one.turn(asked(ASKED))
    more = turns.Message("user", "more")
    await one.turn(asked(ASKED, first.message, more))
    assert one._counters["turns_asked_again"] == 1

  _, _, t = played(steps, ["one", "two", "three"])
  assert t.segment_starts == (0,)
  assert (
    by_author(t, types.Author.MODEL) == f"one{scripted.END}three{scripted.END}"
  )
  assert t.discarded_tokens == len("two") + 1


def test_a_client_that_leaves_while_it_asks_again_loses_nothing():
  async def steps(one):
    await one.turn(asked(ASKED))
    leaving = asyncio.ensure_future(one.turn(asked(ASKED)))
    await asyncio.sleep(0.02)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
      await leaving

  engine = scripted.Engine(
    ["x", "y"], seconds=lambda: 60 if len(engine.requests) == 2 else 0
  )
  _, _, t = played(steps, [], engine=engine)
  assert by_author(t, types.Author.MODEL) == f"x{scripted.END}"
  assert t.discarded_tokens == 0


def test_equal_replies_of_two_conversations_are_told_apart():
  other = turns.Message("user", "other")
  more = turns.Message("user", "more")

  async def steps(one):
    first = await one.turn(asked(ASKED))
    second = await one.turn(asked(other))
    assert first.message == second.message
    await one.turn(asked(other, second.message, more))
    await one.turn(asked(ASKED, first.message, more))
    assert one._counters["forks"] == 1

  _, _, t = played(steps, ["yes", "yes", "a", "b"])
  assert len(t.segment_starts) == 2


def test_a_landing_that_was_cut_off_is_asked_for_again():
  async def steps(one):
    leaving = asyncio.ensure_future(one.turn(asked(ASKED)))
    await asyncio.sleep(0.03)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
      await leaving
    reply = await one.turn(asked(ASKED))
    assert reply.message.content == "late"

  # The second request, which asks for the answer, does not end.
  texts = [call("a"), "never", call("b"), "late"]
  engine = scripted.Engine(
    lambda request: texts[len(engine.requests) - 1],
    seconds=lambda: 60 if len(engine.requests) == 2 else 0,
  )
  _, _, t = played(steps, [], engine=engine, budget=0)
  assert t.violation and t.outcome is types.Outcome.ANSWERED


def test_each_conversation_is_asked_to_land_once():
  other = turns.Message("user", "other")

  async def steps(one):
    assert (await one.turn(asked(ASKED))).message.content == "a"
    assert (await one.turn(asked(other))).message.content == "b"
    assert one._counters["landings"] == 2

  played(steps, [call("a"), "a", call("b"), "b"], budget=0)


def test_dollars_pay_for_all_calls_of_a_turn_or_for_none():
  prices = budgets.Prices(search=10.0)  # A cent for each call.

  async def steps(one):
    reply = await one.turn(asked(ASKED))
    assert reply.message == turns.Message("assistant", "x")

  budget = budgets.Budget(dollars=0.025, prices=prices)
  t = played(steps, [call("a") + call("b") + call("c"), "x"], budget=budget)[2]
  assert t.searches == 0 and t.violation


def test_the_policy_lands_when_three_quarters_of_its_seconds_are_over():
  async def steps(one):
    reply = await one.turn(asked(ASKED))
    assert reply.message.content == "late"

  engine = scripted.Engine(
    lambda request: "late",
    seconds=lambda: 60 if len(engine.requests) == 1 else 0,
  )
  budget = budgets.Budget(searches=2, seconds=0.4)
  _, _, t = played(steps, [], engine=engine, budget=budget)
  assert t.outcome is types.Outcome.ANSWERED and 0.3 <= t.seconds < 0.4


def test_a_prompt_beyond_the_context_is_truncated_not_failed():
  async def steps(one):
    with pytest.raises(turns.RefusedError, match="max_context"):
      await one.turn(asked(turns.Message("user", "long" * 999)))

  _, engine, t = played(steps, [])
  assert t.outcome is types.Outcome.TRUNCATED and not engine.requests


def test_in_tags_a_search_is_charged_whatever_the_program_offers():
  config = config_lib.EpisodeConfig(
    prompts="paper", max_context=4000, max_generated=1000
  )
  web = {**SEARCH, "name": "web"}

  async def steps(one):
    reply = await one.turn(asked(ASKED, tools=(web,)))
    assert reply.message == turns.Message("assistant", scripted.answer("x"))

  texts = [scripted.search("q"), scripted.answer("x")]
  _, _, t = played(steps, texts, budget=0, limits=config)
  assert t.violation and t.searches == 0


@pytest.mark.parametrize("arguments", ["b'x'", "{1}", "..."])
def test_arguments_that_are_no_json_are_no_call(arguments):
  text = f"search(query={arguments})"

  async def steps(one):
    reply = await one.turn(asked(ASKED))
    assert reply.message == turns.Message("assistant", text)

  played(steps, [text])
