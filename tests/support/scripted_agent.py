"""Agents over scripted engines, and an engine that waits to be told."""

from __future__ import annotations

import asyncio
import threading

import scripted
from scripted import answer, search

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib

EMMA = types.Passage("7", '"Emma"', "A novel by Jane Austen.")
CONFIG = config_lib.EpisodeConfig(max_generated=500, max_context=5000)
ANSWERED = (search("emma"), answer("Jane"))


def make(
  script=ANSWERED,
  *,
  retriever=None,
  engine=None,
  codec=scripted.CODEC,
  **kwargs,
):
  return agent_lib.Agent(
    engine or scripted.Engine(script),
    codec,
    retriever or scripted.Retriever({"emma": [EMMA]}),
    **{"config": CONFIG, "slots": 4} | kwargs,
  )


class Held(scripted.Engine):
  """An engine that answers only after `go`."""

  def __init__(self, script=ANSWERED):
    super().__init__(script)
    self.go = threading.Event()
    self.started = threading.Event()

  async def generate(self, request):
    self.started.set()
    while not self.go.is_set():
      await asyncio.sleep(0.005)
    return await super().generate(request)
