"""A controller in this process, at an address, for trainers of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import small_run

from anysearch_jax.launch import controller as command
from anysearch_jax.launch import http_server
from anysearch_jax.policy import hf
from anysearch_jax.rollout import searching
from anysearch_jax.training import (
  collection,
  controller,
  loop,
  remote,
  sampler,
  timeline,
  validation,
)

IDENTITY = {"config.seed": 0}


class Controlled:
  """A controller that can be killed and restarted; use as a context manager.

  url: its address, the same after a restart. made: the controller.
  """

  def __init__(self, folder, config, *, secret="", parts=None, **settings: Any):
    self._folder, self._config, self._secret = folder, config, secret
    given = {"identity": IDENTITY, "about": {}, "away": 60.0}
    self._settings = given | settings
    self._running = contextlib.ExitStack()
    self._port = 0
    self.parts = parts or small_run.parts()

  def start(self) -> None:
    opened = http_server.listening("127.0.0.1", self._port)
    self._running.enter_context(opened)
    self.url = http_server.address(opened)
    self._port = opened.getsockname()[1]
    spans = timeline.Timeline(time.monotonic)
    retriever = self.parts["retriever"]
    searcher = searching.BatchingRetriever(retriever, self._config.search)
    if not (saved := self._folder.with_name("policy")).is_dir():
      hf.save(saved, self.parts["policy"])
    config = dataclasses.replace(self._config, policy=str(saved))
    policy, engine = controller.opened(config, searcher)

    def make() -> sampler.Sampler:
      return sampler.Sampler(
        self._config,
        collection.QuestionStream.of(self.parts["questions"], self._config),
        codec=policy.tokenizer,
        engine=engine,
        retriever=searcher,
        timeline=spans,
      )

    self.made = controller.Controller(
      make,
      parts=(engine, searcher),
      folder=self._folder,
      timeline=spans,
      **self._settings,
    )
    self._running.enter_context(
      command.serving(opened, self.made, self._secret)
    )

  def kill(self) -> None:
    """Ends it as if killed: nobody is told, and nothing is kept."""
    self._running.close()
    self.made.close()

  def __enter__(self) -> Controlled:
    self.start()
    return self

  def __exit__(self, *unused) -> None:
    self.kill()


def train(folder, config, controlled, *, on_event=None, trace=False, **client):
  """Trains with a controller; returns whether it finished.

  `on_event` gets the trainer and the number of each rollout.
  """
  folder.mkdir(exist_ok=True)
  validation.validate(config, apart=True)
  asks = remote.Client(
    url=controlled.url, **{"identity": IDENTITY, "away": 60.0} | client
  )
  parts = dict(controlled.parts, retriever=None)
  trainer = loop.Trainer(
    config, folder=folder, controller=asks, trace=trace, **parts
  )
  small_run.share_programs(trainer, config)
  if on_event is None:
    return trainer.run()
  return trainer.run(lambda event: on_event(trainer, event.rollout))
