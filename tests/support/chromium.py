"""A headless Chromium over the pipe of its own protocol, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

BINARY = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
  """One page; `errors` has what it logged, `width` the width of its device."""

  def __init__(self, write: int, read: Any):
    self._write, self._read = write, read
    self._last = 0
    self._session: str | None = None
    self.errors: list[str] = []
    self._own = "file:"
    self.width = 0
    target = self._call("Target.createTarget", url="about:blank")["targetId"]
    self._session = self._call(
      "Target.attachToTarget", targetId=target, flatten=True
    )["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self._call(f"{domain}.enable")

  def open(self, path: pathlib.Path | str, *, width: int, height: int) -> None:
    """Loads a file or a URL at a size; a narrow size emulates a phone.

    Requests of the URL's own server are no errors.
    """
    self._call("Emulation.setEmulatedMedia", media="")
    self._size(width, height)
    if isinstance(path, str):
      self._own = path
    url = path if isinstance(path, str) else path.resolve().as_uri()
    self._call("Page.navigate", url=url)
    # In a sandbox no listener runs.
    while self.run("document.readyState") != "complete":
      time.sleep(0.01)

  def _size(self, width: int, height: int) -> None:
    self.width = width
    self._call(
      "Emulation.setDeviceMetricsOverride",
      width=width,
      height=height,
      deviceScaleFactor=1,
      mobile=width < 600,
    )

  def run(self, script: str) -> Any:
    """Returns the value of an expression; raises RuntimeError if it fails."""
    found = self._call(
      "Runtime.evaluate",
      expression=script,
      awaitPromise=True,
      returnByValue=True,
    )
    if "exceptionDetails" in found:
      raise RuntimeError(json.dumps(found["exceptionDetails"]))
    return found["result"].get("value")

  def press(self, key: str) -> None:
    """Presses a named key such as Tab or Shift+Enter, or writes a text."""
    codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39}
    named = key.removeprefix("Shift+")
    if named not in codes:
      self._call("Input.insertText", text=key)
      return
    pressed = {"key": named, "code": named}
    pressed |= {"windowsVirtualKeyCode": codes[named]}
    if named != key:
      pressed["modifiers"] = 8
    if named == "Enter":
      pressed["text"] = "\r"
    self._call("Input.dispatchKeyEvent", type="keyDown", **pressed)
    self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

  def allow(self, downloads: pathlib.Path) -> None:
    """Lets the page save files in a folder, and use the clipboard."""
    self._call(
      "Page.setDownloadBehavior",
      behavior="allow",
      downloadPath=str(downloads),
    )
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    self._call("Browser.grantPermissions", permissions=permissions)

  def dark(self) -> None:
    """Emulates a dark theme until a page is opened again."""
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    self._call("Emulation.setEmulatedMedia", features=[feature])

  def printed(self, *, width: int) -> None:
    """Emulates print on paper of a width until a page is opened again."""
    self._call("Emulation.setEmulatedMedia", media="print")
    self._size(width, 800)

  def _call(self, method: str, **params: Any) -> dict[str, Any]:
    self._last += 1
    message = {"id": self._last, "method": method, "params": params}
    if self._session is not None:
      message["sessionId"] = self._session
    os.write(self._write, json.dumps(message).encode() + b"\0")
    while True:
      reply = self._receive()
      if reply.get("id") == self._last:
        if "error" in reply:
          raise RuntimeError(f"{method}: {reply['error']}")
        return reply["result"]
      self._note(reply)

  def _receive(self) -> dict[str, Any]:
    text = bytearray()
    while (byte := self._read.read(1)) != b"\0":
      if not byte:
        raise RuntimeError("Chromium ended.")
      text += byte
    return json.loads(text)

  def _note(self, event: dict[str, Any]) -> None:
    method, params = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
      self.errors.append(json.dumps(params["exceptionDetails"]))
    elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
      self.errors.append(json.dumps(params["args"]))
    elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
      self.errors.append(params["entry"]["text"])
    elif method == "Network.requestWillBeSent":
      url = params["request"]["url"]
      own = ("file:", "about:", "data:", "blob:", self._own)
      own += ("chrome-extension:",)  # The viewer of PDF.
      if not url.startswith(own):
        self.errors.append(f"request of {url}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  with page(tmp_path_factory.mktemp("profile")) as opened:
    yield opened


@contextlib.contextmanager
def page(profile: pathlib.Path) -> Iterator[Page]:
  """Yields a page of a browser that is closed at the end."""
  to_browser, from_browser = os.pipe(), os.pipe()

  def take_pipes() -> None:
    # The protocol's fixed numbers: 3 is read, 4 written.
    read, write = os.dup(to_browser[0]), os.dup(from_browser[1])
    os.dup2(read, 3)
    os.dup2(write, 4)

  process = subprocess.Popen(
    [
      BINARY,
      *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
      "--disable-background-networking",
      f"--user-data-dir={profile}",
      "--remote-debugging-pipe",
    ],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    close_fds=False,
    preexec_fn=take_pipes,
    start_new_session=True,
  )
  os.close(to_browser[0])
  os.close(from_browser[1])
  try:
    with os.fdopen(from_browser[0], "rb") as read:
      yield Page(to_browser[1], read)
  finally:
    os.close(to_browser[1])
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
