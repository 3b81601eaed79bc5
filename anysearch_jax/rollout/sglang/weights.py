"""Loads new weights into SGLang servers through a folder in RAM.

The folder has the Hugging Face format. It is written once and read by every
server. Each server is paused, updated, resumed even after a failure, and then
asked which weights it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pathlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Sequence

from anysearch_jax import types
from anysearch_jax.rollout.sglang import reply as sglang_reply
from anysearch_jax.rollout.sglang import server as sglang_server

_RAM = pathlib.Path("/dev/shm")


def new_run() -> str:
  """Returns a random id, which is part of the names of a run's weights.

  It keeps a run from mistaking the weights of another run for its own.
  """
  return secrets.token_hex(4)


def name(run: str, serial: int, version: int) -> str:
  """Returns the name of weights, which each reply states."""
  return f"{run}.{serial}-{version}"


def of_another_run(found: str, run: str) -> bool:
  """Returns whether `found` names weights of a run that is not `run`.

  A restarted server names the weights of its own folder in another form.
  """
  made = re.fullmatch(r"([0-9a-f]{8})\.\d+-\d+", found)
  return made is not None and made[1] != run


def folder(root: str, urls: Iterable[str]) -> pathlib.Path:
  """Returns the folder for the weights of these servers.

  Only one run may use a set of servers, so files in this folder are left over
  from a run that was killed.

  Args:
    root: a folder that all servers can read; "" is RAM (/dev/shm), or the
      temporary folder if that does not exist.
    urls: addresses of the servers.
  """
  name = hashlib.sha256("\n".join(urls).encode()).hexdigest()[:12]
  default = _RAM if _RAM.is_dir() else pathlib.Path(tempfile.gettempdir())
  base = pathlib.Path(root).absolute() if root else default
  return base / f"anysearch-weights-{name}"


def remove(path: pathlib.Path) -> None:
  """Removes a folder if it exists."""
  shutil.rmtree(path, ignore_errors=True)


async def hand_over(
  servers: Sequence[sglang_server.Server],
  path: pathlib.Path,
  tag: str,
  *,
  in_place: bool,
  deadline: float,
) -> list[types.EngineError | None]:
  """Loads a folder into all servers and checks that they serve it.

  Args:
    servers: updated concurrently.
    path: Hugging Face folder, at the same path for each server.
    tag: the weights' name, which every reply states from then on.
    in_place: whether running requests wait and continue with the new weights.
      Otherwise they are aborted, for servers that name one version per reply.
    deadline: seconds that one server may take to load.

  Returns:
    For each server None if it serves the weights, otherwise why it could not be
    reached.

  Raises:
    types.EngineError: a server did not load the weights or serves others; the
      message says what each server serves.
  """
  outcomes = await asyncio.gather(
    *(
      _update(server, path, tag, in_place=in_place, deadline=deadline)
      for server in servers
    ),
    return_exceptions=True,
  )
  failures: list[types.EngineError | None] = []
  for outcome in outcomes:
    if outcome is None or isinstance(outcome, sglang_server.UnansweredError):
      failures.append(outcome)
      continue
    if not isinstance(outcome, types.EngineError):
      raise outcome
    served = await asyncio.gather(*(_served(server) for server in servers))
    raise types.EngineError(
      f"Weights {tag} did not reach every server: {outcome} Now "
      f"{'; '.join(served)}."
    )
  return failures


async def version(server: sglang_server.Server) -> str:
  """Returns the name of the weights that a server reports."""
  info = await server.get("/model_info", "/get_model_info")
  found = info.get("weight_version")
  if not isinstance(found, str):
    raise server.error(
      f"found weight_version {found!r} in its model_info, expected a name; "
      "launch/requirements-sglang.txt has a version that tells it."
    )
  return found


async def score(
  server: sglang_server.Server,
  token_ids: Sequence[int],
  *,
  name: str,
  deadline: float,
) -> list[float]:
  """Returns log-probabilities of all tokens but the first, at temperature 1.

  Raises:
    types.EngineError: the server is unavailable, or serves other weights than
      those called `name`.
  """
  body = {
    "input_ids": list(token_ids),
    "return_logprob": True,
    "logprob_start_len": 0,
    "sampling_params": {"max_new_tokens": 0},
  }
  try:
    async with asyncio.timeout(deadline):
      reply = await server.generate(body)
  except TimeoutError:
    raise types.EngineError(
      f"{server.url}: no scores within {deadline:g} seconds."
    ) from None
  try:
    return sglang_reply.scores(reply, token_ids, name=name)
  except types.EngineError as error:
    raise server.error(error) from None


async def _update(
  server: sglang_server.Server,
  path: pathlib.Path,
  tag: str,
  *,
  in_place: bool,
  deadline: float,
) -> None:
  try:
    done = await _load(server, path, tag, in_place=in_place, deadline=deadline)
  except BaseException:
    # A server that stays paused would block all later requests and runs.
    with contextlib.suppress(types.EngineError):
      await server.post("/continue_generation", {})
    raise
  await server.post("/continue_generation", {})
  found = await version(server)
  if done.get("success") is True and found == tag:
    return
  error = server.error(
    f"answered {done.get('message')!r} to the update and serves {found!r}, "
    f"expected {tag!r}."
  )
  if done.get("success") is True:  # The server may have been restarted since.
    error = sglang_server.UnansweredError(str(error))
  raise error


async def _load(
  server: sglang_server.Server,
  path: pathlib.Path,
  tag: str,
  *,
  in_place: bool,
  deadline: float,
) -> sglang_server.Json:
  """Pauses a server and loads weights; returns the server's answer."""
  mode = {"mode": "in_place" if in_place else "abort"}
  await server.post("/pause_generation", mode, deadline=deadline)
  done = await server.post(
    "/update_weights_from_disk",
    {
      "model_path": str(path),
      "weight_version": tag,
      # With running requests, flushing would fail after the weights changed.
      "flush_cache": not in_place,
    },
    deadline=deadline,
  )
  if in_place:
    # This succeeds only if no request is running. Otherwise prefixes of the old
    # weights remain until they are evicted, but are never matched again:
    # requests contain the weights' name (`extra_key`).
    with contextlib.suppress(types.EngineError):
      await server.tell("POST", "/flush_cache")
  return done


async def _served(server: sglang_server.Server) -> str:
  try:
    return f"{server.url} serves {await version(server)!r}"
  except types.EngineError as error:
    return f"{server.url} does not say what it serves ({error})"
