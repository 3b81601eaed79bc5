"""Serves the environment: `python -m examples.openenv --port=8000`."""

from __future__ import annotations

import argparse
import functools

import uvicorn
from openenv import core

from examples import budgeted_search
from examples.openenv import environment, models


def main() -> None:
  """Reads the flags, opens the questions and the retriever, and serves."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--questions", default="", help="Parquet, see README.md")
  parser.add_argument("--passages", default="", help="JSON lines")
  parser.add_argument("--split", default="train", help="of the generated world")
  parser.add_argument("--count", type=int, default=1000, help="of questions")
  parser.add_argument("--sessions", type=int, default=256, help="at a time")
  parser.add_argument("--host", default="127.0.0.1")
  parser.add_argument("--port", type=int, default=8000)
  flags = parser.parse_args()
  make = functools.partial(
    environment.SearchEnvironment,
    budgeted_search.open_questions(flags.questions, flags.split, flags.count),
    budgeted_search.open_retriever(flags.passages),
  )
  app = core.create_app(
    make,
    models.Action,
    models.Observation,
    env_name="anysearch",
    max_concurrent_envs=flags.sessions,
    state_cls=models.State,
  )
  uvicorn.run(app, host=flags.host, port=flags.port)


if __name__ == "__main__":
  main()
