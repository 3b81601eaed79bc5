"""Fetches pages within limits: of addresses, redirects, bytes and seconds.

A name that a policy or a search engine wrote may lead into the network of this
machine: to its own services, or to the metadata service of a cloud, which gives
out credentials. So a name is resolved once, all of its addresses are checked,
and the connection is made to a checked address: a second resolution could give
another one (DNS rebinding).

What robots.txt lets a program fetch is read by RFC 9309,
https://www.rfc-editor.org/rfc/rfc9309.html, with Protego.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2
import protego

from anysearch_jax import types

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class PageError(types.RetrievalError):
  """A page cannot be fetched; the message is a sentence about the page.

  Attributes:
    why: the kind of error, under which it is counted: `address`, `robots`,
      `redirects`, `status`, `type`, `late`, `connection` or `text`.
  """

  def __init__(self, sentence: str, why: str = "address"):
    super().__init__(sentence)
    self.why = why


def networks(names: Sequence[str]) -> tuple[Network, ...]:
  """Returns networks by their names, such as `10.0.0.0/8`.

  Raises:
    ValueError: a name is no network or address.
  """
  parsed = []
  for name in names:
    try:
      parsed.append(ipaddress.ip_network(name))
    except ValueError as error:
      raise ValueError(
        f"found {name!r} ({error}), expected a network or an address, such as "
        "10.0.0.0/8 or fd00::/8."
      ) from None
  return tuple(parsed)


# Global for (some versions of) Python, and yet of no public host: Azure's
# metadata, addresses of protocols (Oracle's metadata is one), relays of 6to4,
# and site-local ones.
_CLOSED = networks(
  (
    "168.63.129.16/32",
    "192.0.0.0/24",
    "192.88.99.0/24",
    "fec0::/10",
    "64:ff9b:1::/48",
  )
)


def parse(text: str) -> httpx2.URL:
  """Returns an address of a page.

  Raises:
    PageError: it is no http or https address, or it names a user.
  """
  try:
    url = httpx2.URL(text)
  except (httpx2.InvalidURL, UnicodeError) as error:
    raise PageError(f"{text[:200]!r} is no address ({error}).") from None
  if url.scheme not in ("http", "https") or not url.host:
    raise PageError(
      f"{text[:200]!r} is no address of a page; expected one that begins with "
      "http:// or https://."
    )
  if not 0 < (url.port or 80) < 1 << 16:
    raise PageError(f"{url.port} is no port.")
  if url.userinfo:
    raise PageError("The address names a user; expected one without.")
  return url.copy_with(fragment=None)


def is_open(address: Address, allowed: Sequence[Network] = ()) -> bool:
  """Returns whether a page may be fetched from an IP address.

  Args:
    address: of either version. An IPv4 address within an IPv6 one (mapped,
      6to4, NAT64) counts as itself.
    allowed: networks that are open although they are not public.
  """
  if isinstance(address, ipaddress.IPv6Address):
    embedded = address.ipv4_mapped or address.sixtofour
    if address in _NAT64:
      embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if embedded is not None:
      return is_open(embedded, allowed)
  if any(address in network for network in allowed):
    return True
  return (
    address.is_global
    and not address.is_multicast
    and not address.is_reserved
    and not address.is_unspecified
    and not any(address in network for network in _CLOSED)
  )


async def resolve(host: str, port: int) -> list[str]:
  """Returns the addresses of a host by the system's resolver."""
  loop = asyncio.get_running_loop()
  entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


async def resolve_checked(
  url: httpx2.URL, allowed: Sequence[Network] = (), resolving: Resolve = resolve
) -> list[str]:
  """Resolves the host of a page once, and checks every address.

  Odd spellings of an IP address (`2130706433`, `0x7f.1`) are resolved as the
  system does, so the addresses that they lead to are checked.

  Args:
    url: address of the page.
    allowed: networks that are open although they are not public.
    resolving: returns the addresses of a host; for tests.

  Returns:
    The addresses to connect to, at least one.

  Raises:
    PageError: the host is unknown, or one of its addresses is not open.
    RetrievalError: names cannot be resolved now.
  """
  port = url.port or (443 if url.scheme == "https" else 80)
  try:
    names = await resolving(url.raw_host.decode("ascii"), port)
    parsed = [ipaddress.ip_address(name.partition("%")[0]) for name in names]
  except socket.gaierror as error:
    if error.errno in (socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM):
      raise types.RetrievalError(
        f"{url.host}: its address cannot be looked up now ({error.strerror})."
      ) from None
    raise PageError(f"{url.host}: there is no such host.") from None
  except (UnicodeError, ValueError):
    raise PageError(f"{url.host}: this is no name of a host.") from None
  if not all(is_open(address, allowed) for address in parsed):
    raise PageError(
      f"{url.host}: its address is not public, so nothing is fetched from it."
    )
  return [str(address) for address in parsed]


# RFC 9309: at least 500 KiB are read, and a copy is used for at most 24 hours.
_ROBOTS_LARGEST = 512_000
_SECONDS = 24 * 3600.0
# A site whose file could not be read is asked again after this time.
_RETRY_SECONDS = 60.0
_SITES = 4096

KINDS = ("text/html", "application/xhtml+xml", "text/plain")
_CONNECT_SECONDS = 5.0
# Addresses of a host that are tried.
_TRIED = 3
_REDIRECTS = 5


@dataclasses.dataclass(frozen=True)
class Fetched:
  """The answer of a server.

  Attributes:
    url: address of the page, after redirects.
    kind: content type; of a page that is read, one of `KINDS`.
    charset: the encoding that the server names; "" if it names none.
    data: the body, or its beginning.
    is_whole: whether `data` is all of the body.
    status: status of the answer.
    location: target of a redirect; "" for other answers.
  """

  url: str
  kind: str
  charset: str
  data: bytes
  is_whole: bool
  status: int = 200
  location: str = ""


class Fetcher:
  """Fetches pages; usable from any event loop and thread.

  Every request, also one for a robots.txt or after a redirect, goes to an
  address that `resolve_checked` checked. Cookies, proxies and passwords of
  the environment are not used.

  Args:
    settings: a `config.PagesConfig`.
    resolve: returns the addresses of a host; for tests.
    clock: returns the time in seconds; for tests.
  """

  def __init__(
    self,
    settings: Any,
    *,
    resolve: Resolve = resolve,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._settings = settings
    self._resolve = resolve
    self._allowed = networks(settings.allow_private)
    # Reading the certificates takes 20 ms of a core.
    self._certificates = ssl.create_default_context()
    self._clock = clock
    # By origin: rules (None: nothing may be fetched), and until when they hold.
    self._sites: dict[str, tuple[protego.Protego | None, float]] = {}

  async def fetch(self, address: str) -> Fetched:
    """Returns a page that robots.txt allows; the caller limits the time.

    Raises:
      PageError: the page is refused or does not exist.
      RetrievalError: this machine cannot look up names now.
    """
    page = await self._follow(parse(address), is_page=True)
    if page.status != 200:
      raise PageError(f"{page.url} answers with HTTP {page.status}.", "status")
    if page.kind not in KINDS:
      raise PageError(
        f"{page.url} is of the type {page.kind or 'nothing'!r}; only pages of "
        "text (HTML or plain) are read.",
        "type",
      )
    return page

  async def _follow(self, url: httpx2.URL, *, is_page: bool) -> Fetched:
    """Returns the last of a chain of redirects, each of them checked.

    A page must be allowed by robots.txt; without `is_page`, the address is that
    of a robots.txt.
    """
    for _ in range(_REDIRECTS + 1):
      # The address first: a refused host is not asked for its robots.txt.
      hosts = await resolve_checked(url, self._allowed, self._resolve)
      if is_page:
        await self._check_robots(url)
      page = await self._get(url, hosts, is_page)
      if not page.location:
        return page
      try:
        target = url.join(page.location)
      except httpx2.InvalidURL:
        raise PageError(
          f"{url} leads to an invalid address.", "redirects"
        ) from None
      url = parse(str(target))
    raise PageError(
      f"{url}: found more than {_REDIRECTS} redirects.", "redirects"
    )

  async def _get(
    self, url: httpx2.URL, hosts: Sequence[str], is_page: bool
  ) -> Fetched:
    """Asks the first address that answers."""
    names = []
    for host in hosts[:_TRIED]:
      try:
        return await self._ask(url, host, is_page)
      except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        names.append(type(error).__name__)
    raise PageError(
      f"{url}: the connection failed ({', '.join(names)}).", "connection"
    )

  async def _ask(self, url: httpx2.URL, host: str, is_page: bool) -> Fetched:
    """Sends one request to one address; certificates are of the url's host."""
    async with (
      httpx2.AsyncClient(
        verify=self._certificates,
        trust_env=False,
        timeout=httpx2.Timeout(
          self._settings.deadline, connect=_CONNECT_SECONDS
        ),
      ) as client,
      client.stream(
        "GET",
        url.copy_with(host=host),
        headers={
          "Host": url.netloc.decode("ascii"),
          "User-Agent": self._settings.agent,
          "Accept": "text/html, application/xhtml+xml, text/plain;q=0.9",
          "Accept-Encoding": "gzip, deflate",
        },
        follow_redirects=False,
        extensions={"sni_hostname": url.raw_host.decode("ascii")},
      ) as response,
    ):
      status = response.status_code
      location = ""
      if 300 <= status < 400:
        location = response.headers.get("location", "")
      kind = response.headers.get("content-type", "").partition(";")[0]
      kind = kind.strip().lower()
      data = b""
      is_whole = True
      # The body is read only of a page that will be used.
      if status == 200 and (kind in KINDS or not is_page):
        limit = self._settings.largest if is_page else _ROBOTS_LARGEST
        data, is_whole = await _body(response, limit)
      charset = (response.charset_encoding or "").lower()
      return Fetched(str(url), kind, charset, data, is_whole, status, location)

  async def _check_robots(self, url: httpx2.URL) -> None:
    """Raises PageError unless a site's rules allow a page to be fetched.

    A missing file (4xx) allows all. A site whose file cannot be read allows
    nothing, as the RFC demands.
    """
    site = str(url.copy_with(raw_path=b"/robots.txt"))
    rules, until = self._sites.pop(site, (None, 0.0))
    if self._clock() >= until:
      rules, seconds = await self._rules(site)
      until = self._clock() + seconds
    self._sites[site] = rules, until
    if len(self._sites) > _SITES:
      del self._sites[next(iter(self._sites))]
    if rules is None:
      raise PageError(
        f"{site} cannot be read, so no page of this site is fetched.", "robots"
      )
    if not rules.can_fetch(str(url), self._settings.agent):
      raise PageError(
        f"{site} does not allow this page to be fetched.", "robots"
      )

  async def _rules(self, site: str) -> tuple[protego.Protego | None, float]:
    try:
      page = await self._follow(httpx2.URL(site), is_page=False)
      status = page.status
      data = page.data
    except PageError as error:
      # RFC 9309, 2.3.1.2: after five redirects, a file may count as missing.
      if error.why != "redirects":
        return None, _RETRY_SECONDS
      status = 404
      data = b""
    # The answer of a busy server says nothing about its rules.
    if status >= 500 or status == 429:
      return None, _RETRY_SECONDS
    text = data.decode("utf-8-sig", errors="replace") if status < 300 else ""
    return protego.Protego.parse(text), _SECONDS


async def _body(response: httpx2.Response, limit: int) -> tuple[bytes, bool]:
  """Returns a body up to a size, decompressed, and whether it is all of it.

  Raises PageError for an encoding that is unknown or broken.
  """
  coding = response.headers.get("content-encoding", "").strip().lower()
  data = bytearray()
  try:
    if coding not in ("", "identity", "gzip", "deflate"):
      raise httpx2.DecodingError("it is not gzip or deflate")
    async for chunk in response.aiter_bytes():
      data += chunk
      if len(data) > limit:
        return bytes(data[:limit]), False
  except httpx2.DecodingError as error:
    raise PageError(
      f"The page's encoding {coding[:40]!r} cannot be read ({error}).", "type"
    ) from None
  return bytes(data), True
