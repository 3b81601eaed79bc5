"""Which addresses pages are fetched from, by hand."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import httpx2
import pytest

from anysearch_jax import types

addresses = pytest.importorskip("retrieval.web_pages.addresses")


@pytest.mark.parametrize(
  ("address", "expected"),
  [
    ("93.184.216.34", True),
    ("2606:2800:220:1::1", True),
    ("::ffff:93.184.216.34", True),
    ("64:ff9b::5db8:d822", True),  # 93.184.216.34 behind NAT64.
    ("127.0.0.1", False),
    ("0.0.0.0", False),
    ("10.1.2.3", False),
    ("100.64.0.1", False),  # Shared; Alibaba's metadata is 100.100.100.200.
    ("169.254.169.254", False),  # Metadata of AWS, Google and Azure.
    ("168.63.129.16", False),  # Azure's other one.
    ("192.0.0.192", False),  # Oracle's.
    ("224.0.0.1", False),
    ("240.0.0.1", False),
    ("::", False),
    ("::1", False),
    ("::ffff:127.0.0.1", False),
    ("::ffff:169.254.169.254", False),
    ("2002:7f00:1::", False),  # 127.0.0.1 in 6to4.
    ("64:ff9b::7f00:1", False),
    ("64:ff9b:1::a00:1", False),
    ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),  # Teredo.
    ("fe80::1", False),
    ("fec0::1", False),
    ("fc00::1", False),
    ("fd00:ec2::254", False),  # AWS's metadata.
    ("ff02::1", False),
  ],
)
def test_only_public_addresses_are_open(address, expected):
  assert addresses.is_open(ipaddress.ip_address(address)) is expected


def test_an_allowed_network_is_open_in_every_spelling():
  allowed = addresses.networks(("10.0.0.0/8", "fd00::/8"))
  opens = ("10.1.2.3", "::ffff:10.1.2.3", "2002:0a01:203::", "fd00::1")
  closed = ("11.0.0.1", "127.0.0.1", "::ffff:127.0.0.1", "fc00::1")
  for address in (*opens, "8.8.8.8"):
    parsed = ipaddress.ip_address(address)
    assert addresses.is_open(parsed, allowed) is (address != "11.0.0.1")
  for address in closed[1:]:
    assert not addresses.is_open(ipaddress.ip_address(address), allowed)
  with pytest.raises(ValueError, match="found '10.0.0.1/8'.* such as 10.0"):
    addresses.networks(("10.0.0.1/8",))


@pytest.mark.parametrize(
  "host",
  [
    "127.0.0.1",
    "2130706433",
    "0x7f.1",
    "localhost",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "169.254.169.254",
    "0",
  ],
)
def test_every_spelling_of_this_machine_is_refused(host):
  """By the system's own resolver, which reads them all as addresses."""
  with pytest.raises(
    addresses.PageError, match="not public|no address|no such"
  ):
    url = addresses.parse(f"http://{host}/latest/meta-data")
    asyncio.run(addresses.checked(url))


def looked_up(*found):
  async def resolve(host, port):
    if isinstance(found[0], Exception):
      raise found[0]
    return found

  return resolve


def check(url, *found, allowed=()):
  return asyncio.run(
    addresses.checked(httpx2.URL(url), allowed, looked_up(*found))
  )


def test_one_private_address_among_public_ones_refuses_the_host():
  url = "https://both.example/"
  public = ("93.184.216.34", "2606:2800:220:1::1")
  assert check(url, *public) == list(public)
  for private in ("10.0.0.1", "::1", "fe80::1%eth0"):
    with pytest.raises(addresses.PageError, match="not public") as caught:
      check(url, *public, private)
    assert caught.value.why == "address"
    assert private not in str(caught.value)


def test_ports_of_other_protocols_are_refused():
  for port in (80, 443, 8080):
    assert check(f"http://a.example:{port}/", "93.184.216.34")
  with pytest.raises(addresses.PageError, match="found port 25, expected 80"):
    check("http://a.example:25/", "93.184.216.34")
  inside = addresses.networks(("10.0.0.0/8",))
  assert check("http://a.example:81/", "10.0.0.1", allowed=inside)


def test_an_unknown_host_is_a_fact_and_a_broken_resolver_is_none():
  url = "http://a.example/"
  with pytest.raises(addresses.PageError, match="no such host"):
    check(url, socket.gaierror(socket.EAI_NONAME, "unknown"))
  with pytest.raises(types.RetrievalError, match="cannot be looked up") as met:
    check(url, socket.gaierror(socket.EAI_AGAIN, "temporary"))
  assert not isinstance(met.value, addresses.PageError)


@pytest.mark.parametrize(
  "text",
  [
    "",
    "Emma",
    "file:///etc/passwd",
    "http://",
    "http://[::1/",
    "http://a.example:99999/",
    "http://user:pw@a.example/",
    "http://a\ud800.example/",
    "http://a.example/\ud800",
    "http://a.example:\u00b2/",
  ],
)
def test_what_is_no_address_of_a_page_is_refused(text):
  with pytest.raises(addresses.PageError) as caught:
    addresses.parse(text)
  assert "pw" not in str(caught.value)


def test_a_fragment_is_not_sent():
  assert str(addresses.parse("http://a.example/x#y")) == "http://a.example/x"
