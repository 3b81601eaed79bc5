"""Budgets: what an episode may spend, in any of four units.

A budget of n searches is also written as the number n.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

# The counts of one episode, or arrays of the counts of many.
Counts = TypeVar("Counts", float, np.ndarray)

# A count of searches or tokens that no episode reaches.
UNCAPPED = 2**31 - 1
UNITS = ("searches", "tokens", "dollars", "seconds")
_CAP = re.compile(r"\s*(\w+)=((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*")


@dataclasses.dataclass(frozen=True)
class Prices:
  """Prices in US dollars.

  Attributes:
    search: of 1,000 searches.
    input: of a million tokens that the policy reads.
    output: of a million tokens that the policy writes.
    tools: names of the tools that have a price of their own, with the price of
      1,000 calls.
  """

  search: float = 0.0
  input: float = 0.0
  output: float = 0.0
  tools: tuple[tuple[str, float], ...] = ()

  def __bool__(self) -> bool:
    return any(dataclasses.astuple(self))

  def dollars(
    self, *, searches: Counts, input_tokens: Counts, output_tokens: Counts
  ) -> Counts | float:
    """Returns the cost of these counts; 0 if nothing has a price.

    A count without a price adds nothing, even if it is unknown (nan).

    Args:
      searches: number of searches.
      input_tokens: tokens that the policy read.
      output_tokens: tokens that the policy wrote.
    """
    cost: Counts | float = 0.0
    for price, unit, count in (
      (self.search, 1e3, searches),
      (self.input, 1e6, input_tokens),
      (self.output, 1e6, output_tokens),
    ):
      if price:
        cost = cost + count * price / unit
    return cost

  @property
  def in_tokens(self) -> Prices:
    """The prices in written tokens instead of dollars; `output` must be > 0."""
    unit = 1e6 / self.output
    return Prices(self.search * unit, self.input * unit, 1e6)

  def of_calls(
    self, tools: Sequence[str], *, input_tokens: int, output_tokens: int
  ) -> float:
    """Returns the cost of calls of tools, and of tokens.

    Args:
      tools: the name of the tool of each call.
      input_tokens: tokens that the policy read.
      output_tokens: tokens that the policy wrote.
    """
    tool_prices = dict(self.tools)
    priced = sum(tool_prices.get(tool, 0.0) for tool in tools) / 1e3
    return priced + self.dollars(
      searches=sum(tool not in tool_prices for tool in tools),
      input_tokens=input_tokens,
      output_tokens=output_tokens,
    )


@dataclasses.dataclass(frozen=True)
class Budget:
  """What an episode may spend; a unit that is not assigned has no cap.

  Attributes:
    searches: searches that may be charged, >= 0.
    tokens: tokens that the policy may write, >= 1.
    dollars: what calls of tools and tokens may cost by `prices`, > 0.
    seconds: how long the episode may take, > 0.
    prices: of searches, tokens and tools. Those of the environment's tools are
      added where an episode begins.

  Raises:
    ValueError: a cap is out of range.
  """

  searches: int = UNCAPPED
  tokens: int = UNCAPPED
  dollars: float = math.inf
  seconds: float = math.inf
  prices: Prices = Prices()

  def __post_init__(self):
    for unit, expected, fits in (
      ("searches", f"0 to {UNCAPPED}", 0 <= self.searches <= UNCAPPED),
      ("tokens", "1 or more", 1 <= self.tokens <= UNCAPPED),
      ("dollars", "a number above 0", self.dollars > 0),
      ("seconds", "a number above 0", self.seconds > 0),
    ):
      if not fits:
        raise ValueError(
          f"Found a budget of {getattr(self, unit)} {unit}; expected "
          f"{expected}."
        )

  @property
  def units(self) -> tuple[str, ...]:
    """The units that are assigned, in the order of `UNITS`."""
    return tuple(unit for unit, _ in self.caps)

  @property
  def caps(self) -> tuple[tuple[str, float], ...]:
    """The caps that are assigned, with their units."""
    caps = ((unit, getattr(self, unit)) for unit in UNITS)
    return tuple((u, cap) for u, cap in caps if cap < getattr(NO_CAPS, u))

  @property
  def beyond_searches(self) -> Budget:
    """The same budget without its cap on searches."""
    return dataclasses.replace(self, searches=UNCAPPED)

  def __str__(self) -> str:
    """Returns the budget as `parse` reads it; one of searches is a number."""
    if self.units == ("searches",):
      return str(self.searches)
    return ",".join(f"{unit}={cap}" for unit, cap in self.caps)

  def record(self) -> dict[str, Any]:
    """Returns the caps and the prices as plain values; {} without them."""
    prices = dataclasses.asdict(self.prices) if self.prices else {}
    return {**dict(self.caps), **({"prices": prices} if prices else {})}


Assigned = int | Budget
NO_CAPS = Budget()


def of(budget: Assigned) -> Budget:
  """Returns a budget as a value; a number is one of searches."""
  return budget if isinstance(budget, Budget) else Budget(searches=budget)


def from_record(values: Mapping[str, Any]) -> Budget:
  """Returns the budget of `Budget.record`, maybe after JSON."""
  prices_record = values.get("prices", {})
  tools = tuple((name, price) for name, price in prices_record.get("tools", ()))
  prices = Prices(**(prices_record | {"tools": tools}))
  caps = {unit: values[unit] for unit in UNITS if unit in values}
  return Budget(**caps, prices=prices)


def of_row(row: Mapping[str, Any]) -> Budget:
  """Returns the budget of a recorded episode."""
  caps = from_record(row.get("caps", {}))
  return dataclasses.replace(caps, searches=row["budget"])


def parse(text: str, prices: Prices = NO_CAPS.prices) -> Budget:
  """Returns the budget of a text such as `searches=3,tokens=256`.

  Args:
    text: caps with their units, each unit once; or a number of searches.
    prices: charged if dollars are assigned.

  Raises:
    ValueError: the text has another form, or a cap is out of range.
  """
  caps: dict[str, Any] = {}
  if text.strip().isdecimal():
    return of(int(text))
  for part in text.split(","):
    match = _CAP.fullmatch(part)
    unit = match[1] if match else ""
    number = float(match[2]) if match else math.inf
    whole = unit in UNITS[:2]
    if (
      not match
      or unit not in UNITS
      or (whole and not match[2].isdigit())
      or number == math.inf
    ):
      raise ValueError(
        f"Found {part!r} in the budget {text!r}; expected a number of "
        f"{', '.join(UNITS)}, as in searches=3,tokens=256."
      )
    if unit in caps:
      raise ValueError(
        f"Found {unit} twice in the budget {text!r}; expected each unit once."
      )
    caps[unit] = int(number) if whole else number
  return Budget(**caps, prices=prices)


def parse_tools(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
  """Returns prices of tools, from texts such as `cheap=10`.

  A text is the name of a tool, and the price of 1,000 calls in US dollars.
  Raises ValueError if a text has another form, or a tool occurs twice.
  """
  prices: dict[str, float] = {}
  for text in texts:
    match = _CAP.fullmatch(text)
    if not match or not math.isfinite(float(match[2])) or match[1] in prices:
      raise ValueError(
        f"Found {text!r} in the prices of tools {tuple(texts)}; expected each "
        "tool once with the price of 1,000 calls, as in cheap=10."
      )
    prices[match[1]] = float(match[2])
  return tuple(prices.items())
