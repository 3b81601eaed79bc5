"""One server over HTTP, in the dialect of its engine.

`Server` has the parts that all engines need: requests with deadlines and
retries, the order of steps that load weights, and the lending of memory. A
dialect (`sglang`, `vllm`) is a subclass with the routes and the JSON of these
steps.

A request that meets a broken connection or a busy server is sent again. That is
safe, because no part of an answer has been used. Every other failure is a
`types.EngineError`.

New weights are loaded through a folder of the Hugging Face format. Each server
is paused, updated, resumed even after a failure, and then asked for the name of
its weights. With adapters, that folder is the base, and is loaded once. Only
adapters follow, while turns run, and old ones are unloaded.

A server on the trainer's GPU releases its memory while training. A server would
crash if it had to release while it computes, to release or restore twice, or to
sample without memory. So it is paused and its cache emptied first, a request
that may have been carried out is not repeated, and its weights are renamed: any
process that asks then sees that the server has no memory.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import (
  AsyncIterator,
  Callable,
  Iterable,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

import httpx2
import numpy as np
import tenacity

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import http_calls, redaction
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.rollout.servers import weights as weights_lib

Json = dict[str, Any]

_log = logging.getLogger(__name__)

# After these errors the server has not received the request.
_UNSENT_ERRORS = (httpx2.ConnectError, httpx2.ConnectTimeout)
_CONNECT_SECONDS = 10.0
_CONTROL_SECONDS = 30.0  # For requests that neither sample nor load.
_CLOSE_SECONDS = 5.0
_PATCH_SECONDS = 120.0  # For a host to patch its copy of the weights.
_PATCH_POLL_SECONDS = 0.5  # Between tries to load the patched copy.
# Pauses between tries grow exponentially between these seconds.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
# Maximum number of characters to quote of a connection's error, and of a reply.
_ERROR_CHARACTERS = 300
_REPLY_CHARACTERS = 1000


class UnansweredError(types.EngineError):
  """A server gave no valid answer; another one may, or this one later."""


class OtherWeightsError(types.EngineError):
  """A reply comes from unknown weights, called `name`."""

  def __init__(self, sentence: str, name: str):
    super().__init__(sentence)
    self.name = name


class NotFiniteError(types.EngineError):
  """A reply has a log-probability that is no finite number."""


class _PassingError(Exception):
  """A request met something that may be over when it is sent again."""


class Turn(NamedTuple):
  """A turn to sample.

  Attributes:
    request: the episode's request.
    sampled: the weights that must sample it.
    sampling: how tokens are drawn.
    seed: seed of the draws, for servers that follow it.
    end_of_turn_ids: tokens that end a turn.
    architecture: the policy's.
    known_experts: number of tokens of the context whose experts are known; the
      reply has those of later tokens. None: the reply needs no experts.
  """

  request: types.GenerateRequest
  sampled: weights_lib.Sampled
  sampling: config_lib.SamplingConfig
  seed: int
  end_of_turn_ids: frozenset[int]
  architecture: architecture_lib.Architecture
  known_experts: int | None = None


class Reply(NamedTuple):
  """The tokens that a server sampled.

  Attributes:
    ids: the sampled token ids.
    logps: their log-probabilities.
    versions: the policy version that sampled each.
    cached: number of prompt tokens that the server found in its KV cache.
    reason: why the server ended the turn, in its words.
    experts: `[T, L, K]` of the newest tokens but the last, if asked for.
  """

  ids: tuple[int, ...]
  logps: tuple[float, ...]
  versions: tuple[int, ...]
  cached: int
  reason: str
  experts: np.ndarray | None = None


def adapter_modules(targets: Sequence[str]) -> list[str]:
  """Returns the servers' names of `lora.targets`."""
  return [f"{target}_proj" for target in targets]


def adapter_mismatch(
  rank: int,
  targets: Sequence[str],
  *,
  largest: Any,
  modules: Sequence[str] | None,
) -> str:
  """Returns why the flags of a server do not fit adapters, or "".

  Args:
    rank: the adapters' rank.
    targets: the adapted matrices, as in `lora.targets`.
    largest: the server's --max-lora-rank, as it tells it.
    modules: its --lora-target-modules; None: all.
  """
  if type(largest) is not int or largest < rank:
    return f"its --max-lora-rank is {largest}, the run's rank {rank}"
  missing = {*adapter_modules(targets)} - {*(modules or ())}
  if modules is not None and missing:
    return f"its --lora-target-modules lack {', '.join(sorted(missing))}"
  return ""


class Server(abc.ABC):
  """One server; its methods run in the event loop of the process.

  Args:
    url: address of the server.
    client: an HTTP client without a read deadline.
    config: gives `retries`, and `deadline` if it is below 30 seconds.
    counters: counts `retries`.
    secret: the key; it is removed from everything that is quoted.

  Attributes:
    kind: name of the engine, in messages.
    context_flag: the flag that sets a server's longest context, in messages.
    busy_statuses: HTTP statuses after which another try may be answered.
    info: the server's description of itself, from the last `ready`.
  """

  kind: str
  context_flag: str
  busy_statuses: frozenset[int] = frozenset({429, 502, 503, 504})

  def __init__(
    self,
    url: str,
    *,
    client: httpx2.AsyncClient,
    config: config_lib.ServersConfig,
    counters: Counter[str],
    secret: str = "",
  ):
    self._redact = redaction.Redactor(secret)
    self.url = url.rstrip("/")
    self._client = client
    self._retries = config.retries
    self._patience = min(_CONTROL_SECONDS, config.deadline)
    self._counters = counters
    self._lends = config.colocated
    self.info: Json = {}

  # The dialect. Each method raises types.EngineError if the server refuses or
  # its answer is invalid, and UnansweredError if it does not answer.

  @abc.abstractmethod
  async def healthy(self) -> None:
    """Checks that the server answers."""

  @abc.abstractmethod
  async def version(self, seconds: float = _CONTROL_SECONDS) -> str:
    """Returns the name of the weights that the server reports in time."""

  async def alive(self) -> None:
    """Checks that the server answers, also while it loads weights."""
    await self.version()

  @abc.abstractmethod
  async def describe(self) -> Json:
    """Returns the server's description of itself."""

  @abc.abstractmethod
  def context(self) -> int:
    """Returns the longest context in tokens by `info`, sampled ones included.

    Raises EngineError if the server lacks something that the run needs.
    """

  @abc.abstractmethod
  def check_records(self) -> None:
    """Raises EngineError unless replies have the experts of all tokens."""

  @abc.abstractmethod
  def adapter_refusal(self, rank: int, targets: Sequence[str]) -> str:
    """Returns why the server cannot load such adapters, by `info`, or ""."""

  @abc.abstractmethod
  async def pause(self, *, aborts: bool) -> None:
    """Stops running requests, until `resume`; ends them if it `aborts`."""

  @abc.abstractmethod
  async def resume(self) -> None:
    """Continues the requests; does nothing unless the server is paused."""

  @abc.abstractmethod
  async def update(self, weights: weights_lib.Weights) -> str:
    """Loads the folder of weights; returns why it did not, or ""."""

  @abc.abstractmethod
  async def rename(self, name: str) -> None:
    """Changes the name of the weights that the server serves."""

  @abc.abstractmethod
  async def flush_cache(self, seconds: float = 0.0) -> None:
    """Empties the KV cache once no request runs, within these seconds."""

  @abc.abstractmethod
  async def release_memory(self) -> None:
    """Releases weights and cache; never asked twice."""

  @abc.abstractmethod
  async def restore_memory(self, *, weights: bool, cache: bool) -> None:
    """Allocates the memory of weights or cache again; never asked twice."""

  @abc.abstractmethod
  async def load_adapter(
    self, adapter: weights_lib.Adapter, seconds: float
  ) -> None:
    """Loads an adapter, while turns run."""

  @abc.abstractmethod
  async def unload_adapter(self, name: str) -> None:
    """Unloads an adapter after the requests that use it."""

  @abc.abstractmethod
  async def sample(
    self, turn: Turn, versions: Callable[[], Mapping[str, int]]
  ) -> Reply:
    """Samples a turn, and returns the validated parts of the reply.

    There is no deadline here, nor in `score_once`. The caller sets one: when it
    cancels, the connection is closed, and the server aborts the request.

    Args:
      turn: the turn to sample.
      versions: called after the reply; returns the policy versions of the
        weights that may have sampled, by name, oldest first.

    Raises:
      OtherWeightsError: other weights sampled.
      NotFiniteError: a log-probability is NaN or infinite.
    """

  @abc.abstractmethod
  async def score_once(
    self, token_ids: Sequence[int], sampled: weights_lib.Sampled
  ) -> list[float]:
    """Returns log-probabilities of all tokens but the first; see `score`."""

  # The following methods are the same for every engine.

  async def ready(self) -> int:
    """Checks that the server generates, and can lend memory if it must.

    Returns:
      The longest context in tokens, sampled ones included.
    """
    if weights_lib.is_released(await self.version()):
      await self.restore_memory(weights=True, cache=True)
      await self.rename("resumed")
    # A run that was killed while it loaded weights left the server paused.
    await self.resume()
    await self.healthy()
    self.info = await self.describe()
    return self.context()

  async def lend(self, run: str, name: str) -> None:
    """Releases the memory of weights and caches until `load`.

    Args:
      run: the run's part of the names of weights.
      name: name of the weights that the server serves.

    Raises:
      UnansweredError: the server gave no answer, and may have released.
      types.EngineError: the server refused.
    """
    async with self._paused(aborts=True):
      await self.flush_cache(self._patience)
      await self.rename(weights_lib.released_name(run))
    try:
      await self.release_memory()
    except types.EngineError as error:
      if not isinstance(error, UnansweredError):  # The server keeps its memory.
        await self.rename(name)
        await self.resume()
      raise

  @contextlib.asynccontextmanager
  async def _paused(self, *, aborts: bool) -> AsyncIterator[None]:
    """Pauses the server, and continues it if the block fails.

    A server that stays paused would block all later requests and runs.
    """
    try:
      await self.pause(aborts=aborts)
      yield
    except BaseException:
      with contextlib.suppress(types.EngineError):
        await self.resume()
      raise

  async def load(
    self, weights: weights_lib.Weights, *, lent: bool = False
  ) -> None:
    """Loads weights and checks that the server serves them.

    Args:
      weights: the weights, with the adapters over them.
      lent: whether the server has lent its memory, which is then restored: that
        of the cache only after the weights are loaded.

    Raises:
      UnansweredError: the server could not be reached, or was restarted.
      types.EngineError: it did not load the weights.
    """
    if lent or not weights.adapters or await self.version() != weights.name:
      await self._load_sent(weights, lent=lent)
    if weights.adapters:
      await self._load_adapters(weights, reload=lent)

  async def _load_sent(
    self, weights: weights_lib.Weights, *, lent: bool
  ) -> None:
    """Loads weights as `_load_folder`, once their host has made the folder.

    If the host cannot make it from a delta, or not in time, the server gets the
    whole folder.
    """
    if weights.sender is None:
      await self._load_folder(weights, lent=lent)
      return
    now = asyncio.get_running_loop().time
    deadline = now() + min(_PATCH_SECONDS, weights.deadline)
    while True:
      try:
        await self._load_folder(weights, lent=False)
        return
      except UnansweredError:
        raise
      except types.EngineError as error:
        # The folder may not be there yet: try again until the deadline.
        is_late = now() > deadline
        reason = weights.sender.refusal() or (str(error) if is_late else "")
      if reason:
        break
      await asyncio.sleep(_PATCH_POLL_SECONDS)
    _log.warning(
      "%s gets the whole folder of weights %s, not their delta: %s",
      self.url,
      weights.name,
      reason,
    )
    whole_folder = await asyncio.to_thread(
      weights.sender.whole_folder, weights.path.name
    )
    await self._load_folder(weights._replace(path=whole_folder), lent=False)

  async def _load_folder(
    self, weights: weights_lib.Weights, *, lent: bool
  ) -> None:
    """Loads the folder of weights and checks that the server serves it."""
    # Running requests wait and continue with the new weights.
    async with self._paused(aborts=False):
      if lent:
        await self.restore_memory(weights=True, cache=False)
      refusal = await self.update(weights)
      if lent:
        await self.restore_memory(weights=False, cache=True)
      # This succeeds only if no request is running. Otherwise prefixes of the
      # old weights remain until they are evicted, but are never matched again:
      # requests contain the weights' name.
      with contextlib.suppress(types.EngineError):
        await self.flush_cache()
    await self.resume()
    name = await self.version()
    if not refusal and name == weights.name:
      return
    error = self.error(
      f"answered {refusal!r} to the update and serves {name!r}, expected "
      f"{weights.name!r}."
    )
    # The server may have been restarted since.
    raise error if refusal else UnansweredError(str(error))

  async def loaded_adapters(self) -> set[str]:
    """Returns the names of the adapters that the server has loaded."""
    models = (await self.get("/v1/models")).get("data")
    return {
      str(model.get("id"))
      for model in (models if isinstance(models, list) else [])
      if isinstance(model, dict) and model.get("parent")
    }

  async def missing_adapter(self, weights: weights_lib.Weights) -> str:
    """Returns the name of an adapter that is not loaded, or ""."""
    if not weights.adapters:
      return ""
    loaded = await self.loaded_adapters()
    return next((a.name for a in weights.adapters if a.name not in loaded), "")

  async def _load_adapters(
    self, weights: weights_lib.Weights, *, reload: bool
  ) -> None:
    """Loads the adapters of `weights`, and unloads all others.

    Args:
      weights: the weights with their adapters.
      reload: whether to load also those that the server says it has: their
        memory was released with that of the weights.
    """
    loaded = await self.loaded_adapters()
    names = {adapter.name for adapter in weights.adapters}

    async def unload(names: Iterable[str]) -> None:
      for name in names:
        # An adapter that is still in use is unloaded at the next hand-over.
        with contextlib.suppress(types.EngineError):
          await self.unload_adapter(name)

    if reload:
      await unload(loaded)
      loaded = set()
    refusal = ""
    for adapter in weights.adapters:
      if adapter.name not in loaded:
        try:
          await self.load_adapter(adapter, weights.deadline)
        except UnansweredError:
          raise
        except types.EngineError as error:
          # This also happens if a repeated request finds the adapter loaded, so
          # the list of loaded adapters decides.
          refusal = str(error)
    await unload(loaded - names)
    if missing := await self.missing_adapter(weights):
      raise self.error(f"does not have adapter {missing!r}. {refusal}")

  async def score(
    self,
    token_ids: Sequence[int],
    sampled: weights_lib.Sampled,
    *,
    deadline: float,
  ) -> list[float]:
    """Returns log-probabilities of all tokens but the first, at temperature 1.

    Args:
      token_ids: at least two.
      sampled: the weights that must have scored them.
      deadline: seconds for all requests.

    Raises:
      weights.BaseServedError: the scores are those of the server's base
        although the adapter changes it.
      types.EngineError: the server is unavailable, or serves other weights.
    """
    try:
      async with asyncio.timeout(deadline):
        scores = await self.score_once(token_ids, sampled)
        adapter = sampled.adapter
        if not adapter or not await asyncio.to_thread(adapter.changes_base):
          return scores
        base = sampled._replace(adapter=None)
        base_scores = await self.score_once(token_ids, base)
    except TimeoutError:
      raise UnansweredError(
        f"{self.url}: no scores within {deadline:g} seconds."
      ) from None
    if scores == base_scores:
      raise weights_lib.BaseServedError(
        f"{self.url}: scores a prompt with adapter {adapter.name!r} exactly as "
        "without it, expected other scores: it samples its base. Nothing that "
        "it sampled in this rollout was trained on. Start the server again "
        f"with {self.kind}'s own LoRA flags, then run the same command again."
      )
    return scores

  async def get(self, path: str, seconds: float = _CONTROL_SECONDS) -> Json:
    """Returns the object at this path; the deadline is short."""
    seconds = min(seconds, self._patience)
    return self._json_object(await self.ask("GET", path, deadline=seconds))

  async def post(
    self, path: str, body: Json, *, deadline: float | None = None
  ) -> Json:
    """Returns the object that answers a request.

    Args:
      path: after the server's address.
      body: the request's JSON.
      deadline: seconds for all tries; None: few.
    """
    answer = await self.ask("POST", path, body, deadline=deadline)
    return self._json_object(answer)

  async def ask(
    self,
    method: str,
    path: str,
    body: Json | None = None,
    *,
    deadline: float | None = None,
    repeat: bool = True,
  ) -> httpx2.Response:
    """Sends a request until the server accepts it, and returns its answer.

    Args:
      method: the HTTP method.
      path: after the server's address.
      body: the request's JSON, if it has one.
      deadline: seconds for all tries; None: few.
      repeat: whether the request may be sent again although the server may have
        received it.

    Raises:
      UnansweredError: there was no answer in time, or in all tries.
      types.EngineError: the server refused.
    """
    url = self.url + path
    seconds = deadline or self._patience
    tries = tenacity.AsyncRetrying(
      stop=tenacity.stop_after_attempt(self._retries + 1),
      wait=tenacity.wait_random_exponential(_FIRST_PAUSE, _LONGEST_PAUSE),
      retry=tenacity.retry_if_exception_type(_PassingError),
      before_sleep=lambda _: self._counters.update(retries=1),
      reraise=True,
    )
    try:
      async with asyncio.timeout(seconds):
        return await tries(self._send, method, url, body, repeat)
    except TimeoutError:
      raise UnansweredError(
        f"{url}: no answer within {seconds:g} seconds."
      ) from None
    except httpx2.HTTPError as error:
      # No cause: it would reference the request, which contains the key.
      quoted = self._redact.quote(str(error), _ERROR_CHARACTERS)
      raise types.EngineError(f"{url}: {quoted}") from None
    except _PassingError as error:
      raise UnansweredError(
        f"{url}: tried {tries.statistics['attempt_number']} times, the last "
        f"met {error}. Does {self.kind} run there (docs/rollouts.md)?"
      ) from None

  async def _send(
    self,
    method: str,
    url: str,
    body: Json | None,
    repeat: bool,
  ) -> httpx2.Response:
    """Sends a request once; raises _PassingError if it may be sent again."""
    try:
      response = await self._client.request(method, url, json=body)
    except httpx2.TransportError as error:
      quoted = self._redact.quote(str(error), _ERROR_CHARACTERS)
      text = f"{type(error).__name__}: {quoted}".rstrip(": ")
      if repeat or isinstance(error, _UNSENT_ERRORS):
        raise _PassingError(text) from None
      raise UnansweredError(f"{url}: met {text}.") from None
    if response.status_code == 200:
      return response
    reason = http_calls.message(response.content, self._redact)
    text = f"HTTP {response.status_code}: {reason}"
    if response.status_code not in self.busy_statuses:
      raise types.EngineError(f"{url}: {text}")
    if repeat:
      raise _PassingError(text)
    raise UnansweredError(f"{url}: met {text}.")

  def _json_object(self, response: httpx2.Response) -> Json:
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

  def error(self, problem: object) -> types.EngineError:
    """Returns an error that quotes a reply of this server, without the key.

    Args:
      problem: a clause, or an error. An `OtherWeightsError` and a
        `NotFiniteError` keep their class, because a run handles them apart.
    """
    text = f"{self.url}: {self._redact.quote(str(problem), _REPLY_CHARACTERS)}"
    if isinstance(problem, OtherWeightsError):
      return OtherWeightsError(text, problem.name)
    if isinstance(problem, NotFiniteError):
      return NotFiniteError(text)
    return types.EngineError(text)


def pause_seconds(attempt: int) -> float:
  """Returns seconds before the next check: exponential backoff."""
  return min(_FIRST_PAUSE * 2 ** min(attempt, 99), _LONGEST_PAUSE)


def connect(
  dialect: type[Server],
  config: config_lib.ServersConfig,
  counters: Counter[str],
) -> tuple[httpx2.AsyncClient, Callable[[str], Server]]:
  """Returns a client, and a function that makes the server at an address.

  Args:
    dialect: class of the servers.
    config: addresses, deadlines, and the variable with their key.
    counters: counts `retries`.

  Raises:
    ValueError: a url is missing or invalid, or the key is not set.
  """
  validate(config)
  key = read_key(config)
  client = httpx2.AsyncClient(
    headers={"Authorization": f"Bearer {key}"} if key else {},
    timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
    limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    trust_env=False,  # Servers are inside the network; proxies are not for it.
  )

  def make(url: str) -> Server:
    return dialect(
      url, client=client, config=config, counters=counters, secret=key
    )

  return client, make


def validate(config: config_lib.ServersConfig) -> None:
  """Raises ValueError for invalid addresses or an invalid variable name."""
  addresses = {"servers.urls": config.urls}
  if config.gateway:
    addresses["servers.gateway"] = (config.gateway,)
  if config.router:
    addresses["servers.router"] = (config.router,)
  for name, urls in addresses.items():
    invalid = [url for url in urls if not redaction.is_address(url)]
    if invalid or not urls:
      quoted = redaction.shown(invalid[0]) if invalid else "'none'"
      raise ValueError(
        f"{name}: found {quoted}, expected addresses such as "
        "http://127.0.0.1:30000."
      )
  if config.deltas and (config.colocated or not config.weights):
    raise ValueError(
      "servers.deltas: found it with servers.weights "
      f"{config.weights!r} and servers.colocated {config.colocated}, expected "
      "a folder that the servers' hosts see, and servers of their own."
    )
  if config.api_key_variable:
    redaction.check_variable(
      config.api_key_variable, "servers.api_key_variable"
    )


def read_key(config: config_lib.ServersConfig) -> str:
  """Returns the servers' key, "" if they have none.

  Raises:
    ValueError: the variable is not set or has a value that cannot be sent; the
      message does not show the value.
  """
  variable = config.api_key_variable
  if not variable:
    return ""
  return http_calls.secret_in(variable, "the servers' key")


async def close(client: httpx2.AsyncClient) -> None:
  """Closes all connections, on which servers abort running requests."""
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(_CLOSE_SECONDS):
      await client.aclose()
