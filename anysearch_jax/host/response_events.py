"""Events of OpenAI's Responses API, which lead to a response item by item.

Item types and event names are those of
https://platform.openai.com/docs/api-reference/responses and -streaming.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

Item = dict[str, Any]


class Writer:
  """Writes the events of one response; keeps its items.

  Attributes:
    items: the output so far, in order.
  """

  def __init__(self) -> None:
    self.items: list[Item] = []
    self._name = uuid.uuid4().hex
    self._created = int(time.time())
    self._number = 0

  def add_item(self, prefix: str, kind: str, **values: Any) -> Item:
    """Adds an item to the output.

    Args:
      prefix: beginning of its id, such as `msg`.
      kind: its type, such as `message`.
      **values: its other fields.

    Returns:
      The item, which is in progress.
    """
    name = f"{prefix}_{self._name}{len(self.items):02x}"
    item = {"id": name, "type": kind, "status": "in_progress", **values}
    self.items.append(item)
    return item

  def begin_item(
    self, prefix: str, kind: str, part: Item, **values: Any
  ) -> Iterator[Item]:
    """Adds an item with one part whose text is still empty.

    Args:
      prefix: beginning of its id, such as `msg`.
      kind: its type, such as `message`.
      part: the only part of its content.
      **values: its other fields.

    Yields:
      The events of its beginning.
    """
    item = self.add_item(prefix, kind, content=[part], **values)
    yield self.item_event("response.output_item.added", {**item, "content": []})
    yield self.part_event("response.content_part.added", part={**part})

  def end_item(self, kind: str, **values: Any) -> Iterator[Item]:
    """Yields the end of the last item, whose part has all of its text."""
    item = self.items[-1]
    (part,) = item["content"]
    yield self.part_event(f"response.{kind}.done", text=part["text"], **values)
    yield self.part_event("response.content_part.done", part=part)
    yield self.complete_item()

  def complete_item(self) -> Item:
    """Completes the last item and returns the event that says so."""
    item = self.items[-1]
    item["status"] = "completed"
    return self.item_event("response.output_item.done", item)

  def item_event(self, name: str, /, item: Mapping[str, Any]) -> Item:
    """Returns an event that has all of the last item."""
    return self.event(name, item=item, output_index=len(self.items) - 1)

  def part_event(
    self, name: str, /, *, indexed: bool = True, **values: Any
  ) -> Item:
    """Returns an event of the last item; if `indexed`, of its only part."""
    if indexed:
      values["content_index"] = 0
    return self.event(
      name,
      item_id=self.items[-1]["id"],
      output_index=len(self.items) - 1,
      **values,
    )

  def event(self, name: str, /, **values: Any) -> Item:
    """Returns an event with its number."""
    event = {"type": name, "sequence_number": self._number, **values}
    self._number += 1
    return event

  def values(self, status: str, **values: Any) -> Item:
    """Returns the JSON of the response with its output so far."""
    return {
      "id": f"resp_{self._name}",
      "object": "response",
      "created_at": self._created,
      "status": status,
      "output": list(self.items),
      "error": None,
      "incomplete_details": None,
      "instructions": None,
      "metadata": {},
      "parallel_tool_calls": False,
      "tool_choice": "auto",
      **values,
    }

  def error_event(self, values: Mapping[str, Any]) -> Item:
    """Returns the event of an error that occurs after the first event.

    Args:
      values: the error as `openai_replies.error_of` returns it.
    """
    return self.event(
      "error",
      code=values["code"] or values["type"],
      message=values["message"],
      param=values["param"],
    )


def message_part() -> Item:
  """Returns the part of a message whose text is still empty."""
  return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def usage(prompt_tokens: int, written_tokens: int, cached_tokens: int) -> Item:
  """Returns the usage of a response.

  Args:
    prompt_tokens: number of tokens that the model read.
    written_tokens: number of tokens that the model wrote.
    cached_tokens: number of the prompt's tokens that earlier requests had.
  """
  return {
    "input_tokens": prompt_tokens,
    "input_tokens_details": {
      "cached_tokens": cached_tokens,
      "cache_write_tokens": 0,
    },
    "output_tokens": written_tokens,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": prompt_tokens + written_tokens,
  }
