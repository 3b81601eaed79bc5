"""HTTP requests to SGLang servers, with deadlines and retries.

A request that meets a broken connection or a busy server is sent again. That is
safe: no part of an answer has been used. Every other failure is a
`types.EngineError`.

New weights are loaded through a folder in RAM of the Hugging Face format. It is
written once and read by every server. Each server is paused, updated, resumed
even after a failure, and then asked which weights it serves.

With adapters, that folder is the base, and is loaded once. Only adapters
follow, while turns run, and old ones are unloaded.

A server on the trainer's GPU releases its memory while training. It would end
itself over a release while it computes, a second release or resume, and turns
without memory. So it is paused and emptied first, what may have been done is
not asked again, and its weights are renamed: it says itself that it has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import pathlib
import random
import re
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import httpx2

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import http_calls, redaction
from anysearch_jax.rollout.sglang import adapters as adapters_lib
from anysearch_jax.rollout.sglang import delta
from anysearch_jax.rollout.sglang import reply as sglang_reply

Json = dict[str, Any]

_log = logging.getLogger(__name__)

_BUSY = (429, 502, 503, 504)
_UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout)
_CONNECT_SECONDS, _CONTROL_SECONDS, _ABORT_SECONDS = 10.0, 30.0, 5.0
# How long a host may take to patch its copy, and between looks at it.
_PATCH_SECONDS, _PATCH_POLL = 120.0, 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_RAM = pathlib.Path("/dev/shm")
# What a server releases: weights, and what it gets back after them. The name of
# its weights then ends so.
_WEIGHTS, _REST, _RELEASED = "weights", ("kv_cache", "cuda_graph"), ".released"
# Maximum characters quoted of a connection's error, and of a reply.
_LONGEST, _LONGEST_FOUND = 300, 1000


class UnansweredError(types.EngineError):
  """A server gave no valid answer; another one may, or this one later."""


class Weights(NamedTuple):
  """Weights that servers must serve.

  path: Hugging Face folder, at the same path for each server. name: every reply
  states it. deadline: seconds that one server may take to load. adapters: over
  these weights, oldest first; every request names one of them. sender: where
  hosts make the folder at `path` by a delta, what sends the whole folder.
  """

  path: pathlib.Path
  name: str
  deadline: float
  adapters: tuple[adapters_lib.Adapter, ...] = ()
  sender: delta.Sender | None = None

  def sampled(self, version: int) -> adapters_lib.Sampled:
    """Returns what samples the newest version."""
    newest = self.adapters[-1] if self.adapters else None
    return adapters_lib.Sampled(self.name, version, newest)


class Server:
  """One server; its methods run in the event loop of the process.

  Args:
    url: address of the server.
    client: an HTTP client without a read deadline.
    config: gives `retries`, and `deadline` if it is below 30 seconds.
    counters: counts `retries`.
    secret: the key; it is removed from everything that is quoted.

  Attributes:
    info: its server_info when it was last found ready.
    tasks: those that wait for a generation, or abort one that nobody wants.
  """

  def __init__(
    self,
    url: str,
    *,
    client: httpx2.AsyncClient,
    config: config_lib.SglangConfig,
    counters: Counter[str],
    secret: str = "",
  ):
    self._redact = redaction.Redactor(secret)
    self.url = url.rstrip("/")
    self._client = client
    self._retries = config.retries
    self._patience = min(_CONTROL_SECONDS, config.deadline)
    self._counters, self._lends = counters, config.colocated
    self.info: Json = {}
    self.tasks: set[asyncio.Task] = set()

  async def ready(self) -> int:
    """Checks that the server generates, and can lend memory if it is to.

    Returns:
      The longest context in tokens, sampled ones included.
    """
    if released(await self.version()):
      await self._memory("resume", _WEIGHTS, *_REST)
      await self._rename("resumed")
    # A run that was killed while it loaded weights left the server paused.
    await self.post("/continue_generation", {})
    await self.healthy()
    self.info = info = await self.get("/server_info")
    # Others answer that they have released their memory, and keep it.
    if self._lends and info.get("enable_memory_saver") is not True:
      raise self.error(
        "it keeps its memory, expected a server that releases it while "
        "training (sglang.colocated): start it with --enable-memory-saver."
      )
    longest = info.get("max_req_input_len")
    if type(longest) is not int:
      raise self.error(
        f"found max_req_input_len {longest!r} in its server_info, expected the "
        "longest prompt; expected a server of launch/requirements-sglang.txt."
      )
    return longest - 1  # Prompts are shorter than this number.

  async def healthy(self) -> None:
    """Checks that the server answers."""
    await self._ask("GET", "/health")

  async def version(self, seconds: float = _CONTROL_SECONDS) -> str:
    """Returns the name of the weights that the server reports in time."""
    info = await self.get("/model_info", min(seconds, self._patience))
    found = info.get("weight_version")
    if not isinstance(found, str):
      raise self.error(
        f"found weight_version {found!r} in its model_info, expected a name; "
        "launch/requirements-sglang.txt has a version that tells it."
      )
    return found

  async def lend(self, run: str, found: str) -> None:
    """Releases the memory of weights, KV cache and CUDA graphs until `load`.

    Names have `run` as a part; `found` is that of the weights that it serves.

    Raises:
      UnansweredError: the server gave no answer, and may have released.
      types.EngineError: it refused.
    """
    async with self._paused("abort"):
      await self._ask("POST", f"/flush_cache?timeout={self._patience:g}")
      await self._rename(run + _RELEASED)
    try:
      await self._memory("release", _WEIGHTS, *_REST)
    except types.EngineError as error:
      if not isinstance(error, UnansweredError):  # It keeps its memory.
        await self._rename(found)
        await self.post("/continue_generation", {})
      raise

  @contextlib.asynccontextmanager
  async def _paused(self, mode: str) -> AsyncIterator[None]:
    """Pauses the server, and continues it if the block fails.

    A server that stays paused would block all later requests and runs.
    """
    try:
      await self.post("/pause_generation", {"mode": mode})
      yield
    except BaseException:
      with contextlib.suppress(types.EngineError):
        await self.post("/continue_generation", {})
      raise

  async def _memory(self, change: str, *tags: str) -> None:
    """Changes what the server holds, with a request that is never repeated."""
    path, body = f"/{change}_memory_occupation", {"tags": tags}
    await self._ask("POST", path, lambda: body, repeat=False)

  async def _rename(self, name: str) -> None:
    body = {"new_version": name, "abort_all_requests": False}
    await self.post("/update_weight_version", body)

  async def load(self, weights: Weights, *, lent: bool = False) -> None:
    """Loads weights and checks that the server serves them.

    With `lent`, it gets its memory back, that of its cache after the weights.

    Raises:
      UnansweredError: the server could not be reached, or was restarted.
      types.EngineError: it did not load the weights.
    """
    if lent or not weights.adapters or await self.version() != weights.name:
      await self._load_sent(weights, lent=lent)
    if weights.adapters:
      await self._load_adapters(weights, again=lent)

  async def _load_sent(self, weights: Weights, *, lent: bool) -> None:
    """Loads weights as `_load_folder`, once their host has made the folder.

    If it cannot by a delta, or not in time, it gets the whole folder.
    """
    if weights.sender is None:
      await self._load_folder(weights, lent=lent)
      return
    now = asyncio.get_running_loop().time
    ends = now() + min(_PATCH_SECONDS, weights.deadline)
    while True:
      try:
        await self._load_folder(weights, lent=False)
        return
      except UnansweredError:
        raise
      except types.EngineError as error:
        why = weights.sender.why() or (str(error) if now() > ends else "")
      if why:
        break
      await asyncio.sleep(_PATCH_POLL)
    _log.warning(
      "%s gets the whole folder of weights %s, not their delta: %s",
      *(self.url, weights.name, why),
    )
    whole = await asyncio.to_thread(weights.sender.whole, weights.path.name)
    await self._load_folder(weights._replace(path=whole), lent=False)

  async def lacks(self, weights: Weights) -> str:
    """Returns the name of an adapter that is not loaded, or ""."""
    if not weights.adapters:
      return ""
    loaded = await self._adapters()
    return next((a.name for a in weights.adapters if a.name not in loaded), "")

  async def _adapters(self) -> set[str]:
    """Returns the names of the adapters that the server has loaded."""
    models = (await self.get("/v1/models")).get("data")
    return {
      str(each.get("id"))
      for each in (models if isinstance(models, list) else [])
      if isinstance(each, dict) and each.get("parent")
    }

  async def _load_adapters(self, weights: Weights, *, again: bool) -> None:
    """Loads adapters that are missing, or all, and unloads all others."""
    loaded, wanted = await self._adapters(), {a.name for a in weights.adapters}

    async def unload(names: Iterable[str]) -> None:
      for name in names:
        # It waits for the requests that use it; what stays is unloaded later.
        with contextlib.suppress(types.EngineError):
          await self.post("/unload_lora_adapter", {"lora_name": name})

    if again:  # Their memory was released with that of the weights.
      await unload(loaded)
      loaded = set()
    refused = ""
    for adapter in weights.adapters:
      if adapter.name not in loaded:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        try:
          await self.post("/load_lora_adapter", body, deadline=weights.deadline)
        except types.EngineError as error:
          if isinstance(error, UnansweredError):
            raise
          refused = str(error)  # Or a repeated request: it is loaded already.
    await unload(loaded - wanted)
    if missing := await self.lacks(weights):
      raise self.error(f"does not have adapter {missing!r}. {refused}")

  async def _load_folder(self, weights: Weights, *, lent: bool) -> None:
    """Loads the folder of weights and checks that the server serves it."""
    # Running requests wait and continue with the new weights.
    async with self._paused("in_place"):
      if lent:
        await self._memory("resume", _WEIGHTS)
      done = await self.post(
        "/update_weights_from_disk",
        {
          "model_path": str(weights.path),
          "weight_version": weights.name,
          # With running requests, it would fail after the weights changed.
          "flush_cache": False,
        },
        deadline=weights.deadline,
      )
      if lent:
        await self._memory("resume", *_REST)
      # This succeeds only if no request is running. Otherwise prefixes of the
      # old weights remain until they are evicted, but are never matched again:
      # requests contain the weights' name (`extra_key`).
      with contextlib.suppress(types.EngineError):
        await self._ask("POST", "/flush_cache")
    await self.post("/continue_generation", {})
    found = await self.version()
    loaded = done.get("success") is True
    if loaded and found == weights.name:
      return
    error = self.error(
      f"answered {done.get('message')!r} to the update and serves {found!r}, "
      f"expected {weights.name!r}."
    )
    # The server may have been restarted since.
    raise UnansweredError(str(error)) if loaded else error

  async def score(
    self,
    token_ids: Sequence[int],
    sampled: adapters_lib.Sampled,
    *,
    deadline: float,
  ) -> list[float]:
    """Returns log-probabilities of all tokens but the first, at temperature 1.

    Raises:
      adapters_lib.BaseServedError: they are those of the server's base although
        the adapter changes it.
      types.EngineError: the server is unavailable, or serves other weights.
    """

    async def ask(sampled: adapters_lib.Sampled) -> list[float]:
      body = sampled.body(
        token_ids, logprob_start_len=0, sampling_params={"max_new_tokens": 0}
      )
      reply = await self.generate(body)
      try:
        return sglang_reply.scores(reply, token_ids, name=sampled.weights)
      except types.EngineError as error:
        raise self.error(error) from None

    try:
      async with asyncio.timeout(deadline):
        scores = await ask(sampled)
        adapter = sampled.adapter
        if not adapter or not await asyncio.to_thread(adapter.changes):
          return scores
        base = await ask(sampled._replace(adapter=None))
    except TimeoutError:
      raise UnansweredError(
        f"{self.url}: no scores within {deadline:g} seconds."
      ) from None
    if scores == base:
      raise adapters_lib.BaseServedError(
        f"{self.url}: scores a prompt with adapter {adapter.name!r} exactly as "
        "without it, expected other scores: it samples its base. Nothing that "
        "it sampled in this rollout was trained on. Start the server again "
        f"with SGLang's own LoRA flags, then run the same command again."
      )
    return scores

  async def get(self, path: str, deadline: float | None = None) -> Json:
    """Returns the object at this path; the default deadline is short."""
    return self._object(await self._ask("GET", path, deadline=deadline))

  async def post(
    self, path: str, body: Json, *, deadline: float | None = None
  ) -> Json:
    """Returns the object that answers `body`; the default deadline is short."""
    answer = await self._ask("POST", path, lambda: body, deadline=deadline)
    return self._object(answer)

  async def generate(self, body: Json) -> Json:
    """Generates; aborts every try that the server may still be working on.

    There is no deadline here: the caller sets one and cancels.
    """
    waiting: list[str] = []
    mine = asyncio.current_task()
    assert mine is not None  # This is a coroutine.
    self.tasks.add(mine)

    def request() -> Json:
      # A new id for each try: the server refuses an id that is still running.
      waiting.append(uuid.uuid4().hex)
      return body | {"rid": waiting[-1]}

    try:
      response = await self._ask(
        "POST", "/generate", request, deadline=math.inf
      )
      waiting.pop()
    except types.EngineError as error:
      if not isinstance(error, UnansweredError):
        waiting.pop()  # It was refused.
      raise
    finally:
      self.tasks.discard(mine)
      for rid in waiting:
        task = asyncio.create_task(self._abort(rid))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
    return self._object(response)

  async def _abort(self, rid: str) -> None:
    # An unavailable server generates nothing either.
    with contextlib.suppress(httpx2.HTTPError, TimeoutError):
      async with asyncio.timeout(_ABORT_SECONDS):
        await self._client.post(f"{self.url}/abort_request", json={"rid": rid})

  async def _ask(
    self,
    method: str,
    path: str,
    body: Callable[[], Json | None] = lambda: None,
    *,
    deadline: float | None = None,
    repeat: bool = True,
  ) -> httpx2.Response:
    """Sends a request until the server accepts it, and returns its answer.

    Without `repeat`, only until a connection is there to send it.
    """
    url, deadline = self.url + path, deadline or self._patience
    try:
      async with asyncio.timeout(deadline):
        for attempt in range(self._retries + 1):
          if attempt:
            self._counters["retries"] += 1
            await asyncio.sleep(pause(attempt))
          try:
            response = await self._client.request(method, url, json=body())
          except httpx2.TransportError as error:
            met = self._redact.quote(str(error), _LONGEST)
            met = f"{type(error).__name__}: {met}".rstrip(": ")
            if not repeat and not isinstance(error, _UNSENT):
              break
            continue
          if response.status_code == 200:
            return response
          said = http_calls.message(response.content, self._redact)
          met = f"HTTP {response.status_code}: {said}"
          if response.status_code not in _BUSY:
            raise types.EngineError(f"{url}: {met}")
          if not repeat:
            break
    except TimeoutError:
      raise UnansweredError(
        f"{url}: no answer within {deadline:g} seconds."
      ) from None
    except httpx2.HTTPError as error:
      # No cause: it would reference the request, which contains the key.
      met = self._redact.quote(str(error), _LONGEST)
      raise types.EngineError(f"{url}: {met}") from None
    raise UnansweredError(
      f"{url}: tried {attempt + 1} times, the last met {met}. Is an "
      "SGLang server running there (launch/serve_sglang.sh)?"
    )

  def _object(self, response: httpx2.Response) -> Json:
    """Returns the JSON object in a response."""
    try:
      value = json.loads(self._redact.scrub(response.content))
    except (ValueError, RecursionError):
      value = None
    if not isinstance(value, dict):
      raise types.EngineError(
        f"{response.url}: found {self._redact.quote(response.content, 80)!r}, "
        "expected a JSON object."
      )
    return value

  def error(self, found: object) -> types.EngineError:
    """Returns an error that quotes a reply of this server, without the key."""
    shown = self._redact.quote(str(found), _LONGEST_FOUND)
    return types.EngineError(f"{self.url}: {shown}")


def connect(
  config: config_lib.SglangConfig, counters: Counter[str]
) -> tuple[httpx2.AsyncClient, Callable[[str], Server]]:
  """Returns a client, and a function that makes the server at an address.

  Raises:
    ValueError: a url is missing or invalid, or the key is not set.
  """
  validate(config)
  key = read_key(config)
  headers = {"Authorization": f"Bearer {key}"} if key else {}
  client = httpx2.AsyncClient(
    headers=headers,
    timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
    limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    trust_env=False,  # Proxies are for the outside.
  )

  def make(url: str) -> Server:
    return Server(
      url, client=client, config=config, counters=counters, secret=key
    )

  return client, make


def validate(config: config_lib.SglangConfig) -> None:
  """Raises ValueError for invalid addresses or an invalid variable name."""
  if config.gateway and not redaction.is_address(config.gateway):
    raise ValueError(
      f"sglang.gateway: found {redaction.shown(config.gateway)}, expected an "
      "address such as http://127.0.0.1:30000."
    )
  wrong = [url for url in config.urls if not redaction.is_address(url)]
  if wrong or not config.urls:
    found = redaction.shown(wrong[0]) if wrong else "'none'"
    raise ValueError(
      f"sglang.urls: found {found}, expected addresses such as "
      "http://127.0.0.1:30000."
    )
  if config.deltas and (config.colocated or not config.weights):
    raise ValueError(
      "sglang.deltas: found it with sglang.weights "
      f"{config.weights!r} and sglang.colocated {config.colocated}, expected "
      "a folder that the servers' hosts see, and servers of their own."
    )
  if config.api_key_variable:
    redaction.check_variable(config.api_key_variable, "sglang.api_key_variable")


def read_key(config: config_lib.SglangConfig) -> str:
  """Returns the servers' key, "" if they have none.

  Raises:
    ValueError: the variable is not set or has a value that cannot be sent; the
      message does not show the value.
  """
  variable = config.api_key_variable
  return variable and http_calls.secret_in(variable, "the servers' key")


def pause(attempt: int) -> float:
  """Returns seconds before the next try: exponential backoff with jitter."""
  seconds = min(_FIRST_PAUSE * 2 ** min(attempt, 99), _LONGEST_PAUSE)
  return seconds * random.uniform(0.5, 1.5)


async def close(client: httpx2.AsyncClient, servers: Sequence[Server]) -> None:
  """Closes the connections of servers, after what is under way."""
  await asyncio.sleep(0)
  # A cancelled request starts an abort, so loop until no task is left.
  while tasks := {task for server in servers for task in server.tasks}:
    _, late = await asyncio.wait(tasks, timeout=_ABORT_SECONDS)
    for task in late:
      task.cancel()
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(_ABORT_SECONDS):
      await client.aclose()


def of_run(found: str, run: str) -> bool:
  """Returns whether weights called `found` were handed over by `run`."""
  return found.startswith(f"{run}.")


def of_another_run(found: str, run: str) -> bool:
  """Returns whether weights called `found` are of a run that is not `run`.

  Each run has a random part in the names of its weights, so that it does not
  mistake the weights of another run for its own. A restarted server names the
  weights of its own folder in another form.
  """
  made = re.fullmatch(rf"([0-9a-f]{{8}})(\.\d+-\d+|{_RELEASED})", found)
  return made is not None and made[1] != run


def released(found: str) -> bool:
  """Returns whether a server whose weights are called so has no memory."""
  return found.endswith(_RELEASED)


def folder(root: str, urls: Iterable[str]) -> pathlib.Path:
  """Returns the folder for the weights of these servers.

  Only one run may use a set of servers, so files in this folder are left over
  from a run that was killed. `root` is a folder that all servers can read; ""
  is RAM (/dev/shm), or the temporary folder if that does not exist.
  """
  name = hashlib.sha256("\n".join(urls).encode()).hexdigest()[:12]
  default = _RAM if _RAM.is_dir() else pathlib.Path(tempfile.gettempdir())
  base = pathlib.Path(root).absolute() if root else default
  return base / f"anysearch-weights-{name}"
