"""What robots.txt lets a program fetch, by RFC 9309.

https://www.rfc-editor.org/rfc/rfc9309.html
"""

from __future__ import annotations

import asyncio
import collections
import time
import weakref
from collections.abc import Awaitable, Callable

import httpx2
import protego

from retrieval.web_pages import addresses

# RFC 9309: at least 500 KiB are read, and a copy is used for at most 24 hours.
LARGEST = 512_000
_SECONDS = 24 * 3600.0
# A site whose file could not be read is asked again after this time.
_RETRY_SECONDS = 60.0
_SITES = 4096

# Returns status and text of an address.
Get = Callable[[httpx2.URL], Awaitable[tuple[int, bytes]]]


class Robots:
  """The rules of sites, remembered for a day.

  Args:
    agent: the name that rules are looked up by.
    get: fetches a robots.txt.
    clock: monotonic seconds.
  """

  def __init__(
    self,
    agent: str,
    get: Get,
    *,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._agent, self._get, self._clock = agent, get, clock
    # By origin: rules (None: nothing may be fetched), and until when they hold.
    self._sites: collections.OrderedDict[
      str, tuple[protego.Protego | None, float]
    ] = collections.OrderedDict()
    # Held while a file is read, so that pages of a site read it once. A lock
    # belongs to an event loop, and is forgotten when nobody holds it.
    self._locks: weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock] = (
      weakref.WeakValueDictionary()
    )

  async def check(self, url: httpx2.URL) -> None:
    """Returns if a page may be fetched.

    A missing file (4xx) allows all. A site whose file cannot be read allows
    nothing, as the RFC demands.

    Raises:
      PageError: the rules do not allow it, or they cannot be read.
    """
    site = str(url.copy_with(raw_path=b"/robots.txt"))
    name = id(asyncio.get_running_loop()), site
    lock = self._locks.setdefault(name, asyncio.Lock())
    async with lock:
      rules = await self._rules(site)
    if rules is None:
      raise addresses.PageError(
        f"{site} cannot be read, so no page of this site is fetched.", "robots"
      )
    if not rules.can_fetch(str(url), self._agent):
      raise addresses.PageError(
        f"{site} does not allow this page to be fetched.", "robots"
      )

  async def _rules(self, site: str) -> protego.Protego | None:
    """Returns the rules of a site, remembered or read."""
    rules, until = self._sites.get(site, (None, 0.0))
    if self._clock() >= until:
      rules, seconds = await self._read(site)
      self._sites[site] = (rules, self._clock() + seconds)
      self._sites.move_to_end(site)
      while len(self._sites) > _SITES:
        self._sites.popitem(last=False)
    return rules

  async def _read(self, site: str) -> tuple[protego.Protego | None, float]:
    try:
      status, data = await self._get(httpx2.URL(site))
    except addresses.PageError as error:
      # RFC 9309, 2.3.1.2: after five redirects, a file may count as missing.
      if error.why != "redirects":
        return None, _RETRY_SECONDS
      status, data = 404, b""
    # A server that is busy says nothing about what it allows.
    if status >= 500 or status == 429:
      return None, _RETRY_SECONDS
    text = data.decode("utf-8-sig", errors="replace") if status < 300 else ""
    return protego.Protego.parse(text), _SECONDS
