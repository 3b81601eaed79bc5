"""Requests that web pages of others have a browser send to a service."""

from __future__ import annotations

import http.client

_JSON = ("Content-Type", "application/json")
_PLAIN = ("Content-Type", "text/plain")
_EVIL = "rebound.example"


def status(address, path, *headers, method="POST"):
  """Returns the status and body of a request with exactly these headers."""
  host, port = address
  connection = http.client.HTTPConnection(host, port, timeout=30)
  connection.putrequest(method, path, skip_host=True)
  for name, value in (*headers, ("Content-Length", "2")):
    connection.putheader(name, value)
  connection.endheaders(b"{}")
  response = connection.getresponse()
  found = response.status, response.read().decode()
  connection.close()
  return found


def check(url, path, metrics="/metrics"):
  """Checks that a service without keys refuses them, and nothing else."""
  host, port = address = url.removeprefix("http://").split("/")[0].split(":")
  own = f"{host}:{port}"
  for name in (own, "LOCALHOST.:9999", "localhost", "[::1]:80", "[0:0::1]"):
    for headers in ([_PLAIN], [_JSON, ("Origin", f"http://{name}")]):
      found, said = status(address, path, ("Host", name), *headers)
      assert found not in (403, 415, 421), (name, said)
  for names in (
    *([_EVIL], [f"{_EVIL}:{port}"], [f"localhost.{_EVIL}"], ["10.0.0.7"]),
    *([f"127.0.0.1.{_EVIL}"], [f"{own}@{_EVIL}"], [f"{_EVIL}@{own}"], [""]),
    *([own, _EVIL], [_EVIL, own], [own, own], [f"{own},{_EVIL}"], ["[x]"], []),
  ):
    hosts = [("Host", name) for name in names]
    for method, where in (("POST", path), ("GET", metrics), ("OPTIONS", "/")):
      found, said = status(address, where, *hosts, _JSON, method=method)
      assert found == 421 and "with --hosts=" in said, (names, said)
  for page in (
    *(f"http://{_EVIL}", "null", "", f"http://localhost:{port}", "file://"),
    *(f"http://{own}.{_EVIL}", f"http://{own}@{_EVIL}", f"http://{host}:1"),
  ):
    sent = ("Host", own), ("Origin", page), ("X-Forwarded-Host", _EVIL)
    for method, kind in (("POST", _JSON), ("POST", _PLAIN), ("OPTIONS", _JSON)):
      found, said = status(address, path, *sent, kind, method=method)
      assert found == 403 and "Origin: found" in said, (page, found, said)
  for header in (("Sec-Fetch-Site", "cross-site"), ("Origin", f"http://{own}")):
    assert status(address, path, ("Host", own), header, _PLAIN)[0] == 415
