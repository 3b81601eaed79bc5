"""The models that OpenAI's client has of the events of a response."""

from __future__ import annotations

import typing

import openai.types.responses


def check(event):
  """Fails unless an event is strictly one of the client's types."""
  _model_of(event["type"]).model_validate(event, strict=True)


def _model_of(name):
  """Returns the client's class of an event."""
  for model in vars(openai.types.responses).values():
    fields = getattr(model, "model_fields", {})
    if "type" in fields and name in typing.get_args(fields["type"].annotation):
      return model
  raise ValueError(name)
