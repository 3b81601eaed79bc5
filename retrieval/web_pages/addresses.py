"""Which addresses pages may be fetched from.

A name that a policy or a search engine wrote may lead into the network of this
machine: to its own services, or to the metadata service of a cloud, which gives
out credentials. So a name is resolved once, all of its addresses are checked,
and the connection is made to a checked address: a second resolution could give
another one (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

import httpx2

from anysearch_jax import types

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

# Global for (some versions of) Python, and yet of no public host: Azure's
# metadata, addresses of protocols (Oracle's metadata is one), relays of 6to4,
# and site-local ones.
_CLOSED = tuple(
  map(
    ipaddress.ip_network,
    (
      *("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24"),
      *("fec0::/10", "64:ff9b:1::/48"),
    ),
  )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Below 1024, ports belong to other protocols; mail servers obey HTTP's lines.
_PORTS = (80, 443)
_LOWEST_PORT = 1024


class PageError(types.RetrievalError):
  """A page was not fetched: a fact about the page, in a sentence.

  why: counts the error: `address`, `robots`, `redirects`, `status`, `type`,
    `large`, `late`, `connection` or `text`.
  """

  def __init__(self, sentence: str, why: str):
    super().__init__(sentence)
    self.why = why


def networks(names: Sequence[str]) -> tuple[Network, ...]:
  """Returns networks by their names, such as `10.0.0.0/8`.

  Raises:
    ValueError: a name is no network or address.
  """
  found = []
  for name in names:
    try:
      found.append(ipaddress.ip_network(name))
    except ValueError as error:
      raise ValueError(
        f"found {name!r} ({error}), expected a network or an address, such as "
        "10.0.0.0/8 or fd00::/8."
      ) from None
  return tuple(found)


def parse(text: str) -> httpx2.URL:
  """Returns an address of a page.

  Raises:
    PageError: it is no http or https address, or it names a user.
  """
  try:
    url = httpx2.URL(text)
  except (httpx2.InvalidURL, UnicodeError) as error:
    raise PageError(
      f"{text[:200]!r} is no address ({error}).", "address"
    ) from None
  if url.scheme not in ("http", "https") or not url.host:
    raise PageError(
      f"{text[:200]!r} is no address of a page; expected one that begins with "
      "http:// or https://.",
      "address",
    )
  if not 0 < (url.port or 80) < 1 << 16:
    raise PageError(f"{url.port} is no port.", "address")
  if url.userinfo:
    raise PageError(
      "The address names a user; expected one without.", "address"
    )
  return url.copy_with(fragment=None)


def is_open(address: Address, allowed: Sequence[Network] = ()) -> bool:
  """Returns whether a page may be fetched from an IP address.

  Args:
    address: of either version. An IPv4 address within an IPv6 one (mapped,
      6to4, NAT64) counts as itself.
    allowed: networks that are open although they are not public.
  """
  if isinstance(address, ipaddress.IPv6Address):
    within = address.ipv4_mapped or address.sixtofour
    if address in _NAT64:
      within = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if within is not None:
      return is_open(within, allowed)
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
  found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  return list(dict.fromkeys(str(each[4][0]) for each in found))


async def checked(
  url: httpx2.URL,
  allowed: Sequence[Network] = (),
  resolving: Resolve = resolve,
) -> list[str]:
  """Resolves the host of a page once, and checks every address.

  Odd spellings of an IP address (`2130706433`, `0x7f.1`) are resolved as the
  system does, so they are checked as what they lead to.

  Returns:
    The addresses to connect to, at least one.

  Raises:
    PageError: the host is unknown, or one of its addresses is not open.
    RetrievalError: names cannot be resolved now.
  """
  port = url.port or (443 if url.scheme == "https" else 80)
  try:
    found = await resolving(url.raw_host.decode("ascii"), port)
    parsed = [ipaddress.ip_address(each.partition("%")[0]) for each in found]
  except socket.gaierror as error:
    if error.errno in (socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM):
      raise types.RetrievalError(
        f"{url.host}: its address cannot be looked up now ({error.strerror})."
      ) from None
    raise PageError(f"{url.host}: there is no such host.", "address") from None
  except (UnicodeError, ValueError):
    raise PageError(
      f"{url.host}: this is no name of a host.", "address"
    ) from None
  if not parsed:
    raise PageError(f"{url.host}: there is no such host.", "address")
  if not all(is_open(each, allowed) for each in parsed):
    raise PageError(
      f"{url.host}: its address is not public, so nothing is fetched from it.",
      "address",
    )
  private = all(any(a in n for n in allowed) for a in parsed)
  if port not in _PORTS and port < _LOWEST_PORT and not private:
    raise PageError(
      f"{url.host}: found port {port}, expected 80, 443 or one from "
      f"{_LOWEST_PORT} on.",
      "address",
    )
  return [str(each) for each in parsed]
