"""Has programs play the episodes of a rollout, each in a session of its own."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.host import loop
from anysearch_jax.rollout import driver
from anysearch_jax.sessions import (
  conversation,
  endpoint,
  programs,
  session,
  turns,
)

_MODEL = "policy"
# Events after which nothing of a program's episode is trained on.
_MISUSES = {
  "large_body": "The program sent a body that is too large.",
  "too_many_requests": "The program sent too many requests at a time.",
}


class ProgramPlayer:
  """A `driver.Player`: a program, and the endpoint that it talks to.

  The endpoint is open until `close`.

  Args:
    config: the settings of programs.
    sampling: how the run samples.

  Attributes:
    counters: `sessions` and what they count, see `session.Session`, and the
      refusals of the endpoint.

  Raises:
    ValueError: there is no such program, or the port is not free.
  """

  def __init__(
    self,
    config: config_lib.AgentsConfig,
    sampling: config_lib.SamplingConfig,
  ):
    self.counters: Counter[str] = Counter()
    self._config = config
    self._sampling = {
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
      "presence_penalty": 0.0,
      "frequency_penalty": 0.0,
    }
    self._program = programs.open_program(config.program)
    self._sessions: dict[str, session.Session] = {}
    self._endpoint = endpoint.Endpoint(self, model=_MODEL)
    self._address = config.address.rstrip("/")
    base = loop.run(self._endpoint.open(config.host, port=config.port))
    if not self._address:
      self._address = base

  def find(self, session_id: str) -> session.Session | None:
    return self._sessions.get(session_id)

  def note(self, event: str, session_id: str = "") -> None:
    self.counters[event] += 1
    program = self._sessions.get(session_id)
    if program is not None and event in _MISUSES:
      program.spoil(event, _MISUSES[event])

  def intruded(self, key: str) -> None:
    for open_session in self._sessions.values():
      if hmac.compare_digest(open_session.key.encode(), key.encode()):
        open_session.spoil(
          "intruder", "The program asked for the session of another one."
        )

  async def play(
    self,
    question: types.Question,
    parts: driver.EpisodeParts,
    *,
    budget: budgets.Budget,
    scaffold: bool,
    address: types.Address,
    inflight: driver.InFlight,
    deadline: float,
  ) -> types.Trajectory:
    """Has the program play one episode.

    Args:
      question, parts, budget, scaffold, address: as in `driver.Player`.
      inflight: notes the turns that the session waits for.
      deadline: seconds that the episode may take.
    """
    codec = parts.codec
    if not isinstance(codec, conversation.Codec):
      raise ValueError(
        f"agents.program: found the codec {type(codec).__name__}, which renders"
        " no conversations; expected a policy with a tokenizer of its own."
      )
    seconds = min(deadline, self._config.deadline)
    opened = session.Session(
      question,
      parts=parts,
      codec=codec,
      budget=budget,
      scaffold=scaffold,
      address=address,
      config=self._config,
      sampling=self._sampling,
      counters=self.counters,
      inflight=inflight,
      seconds=deadline,
    )
    self.counters["sessions"] += 1
    self._sessions[opened.id] = opened
    url = f"{self._address}/sessions/{opened.id}"
    task = programs.Task(
      base_url=f"{url}/v1",
      api_key=opened.key,
      model=_MODEL,
      outcome_url=f"{url}/outcome",
      question_id=question.id,
      question=question.text,
      corpus=question.corpus,
      budget=dict(opened.budget.caps),
      scaffold=scaffold,
    )
    try:
      async with asyncio.timeout(seconds):
        report = await self._program.play(task)
      if report != turns.Report():
        opened.report(report)
    except TimeoutError:
      opened.spoil(
        "deadline",
        f"The program did not end within {seconds:g} seconds "
        "(agents.deadline).",
      )
    except programs.ProgramError as error:
      # A program need not handle the refusal of a spent budget.
      if not opened.is_refused:
        opened.spoil("program", f"The program failed: {error}.")
    except turns.RefusedError as error:
      opened.spoil("report", error.message)
    finally:
      del self._sessions[opened.id]
      trajectory = opened.trajectory()
    return trajectory

  def close(self) -> None:
    """Ends the programs and closes the endpoint."""
    loop.run(self._close())

  async def _close(self) -> None:
    await self._program.close()
    await self._endpoint.close()
