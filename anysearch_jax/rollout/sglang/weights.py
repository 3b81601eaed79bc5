"""Handing new weights to SGLang servers, through a folder in RAM.

The folder is a Hugging Face one, written once and read by every server. Each is
paused, updated, continued whatever happened, and then asked what it serves.
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
  """A run's part of the names of its weights.

  So that no run takes another's weights for its own.
  """
  return secrets.token_hex(4)


def name(run: str, serial: int, version: int) -> str:
  """What weights are called, which each reply says that it is of."""
  return f"{run}.{serial}-{version}"


def of_another_run(found: str, run: str) -> bool:
  """Whether weights have such a name, of a run that is not `run`.

  A server that was started again calls those of its folder something else.
  """
  made = re.fullmatch(r"([0-9a-f]{8})\.\d+-\d+", found)
  return made is not None and made[1] != run


def folder(root: str, urls: Iterable[str]) -> pathlib.Path:
  """Where the weights for these servers stand; what is there is of a dead run.

  Args:
    root: a folder that they all see; "" is RAM, or else the temporary folder.
    urls: of the servers, which one run has for itself.
  """
  name = hashlib.sha256("\n".join(urls).encode()).hexdigest()[:12]
  default = _RAM if _RAM.is_dir() else pathlib.Path(tempfile.gettempdir())
  base = pathlib.Path(root).absolute() if root else default
  return base / f"anysearch-weights-{name}"


def remove(path: pathlib.Path) -> None:
  """Gives the room back; a folder that is not there is no error."""
  shutil.rmtree(path, ignore_errors=True)


async def hand_over(
  servers: Sequence[sglang_server.Server],
  path: pathlib.Path,
  tag: str,
  *,
  in_place: bool,
  deadline: float,
) -> list[types.EngineError | None]:
  """Has all servers load a folder and answer under its name.

  Args:
    servers: updated side by side.
    path: Hugging Face folder, at the same place for each of them.
    tag: the weights' name, which every reply carries from then on.
    in_place: requests that run wait and go on with the new weights; else they
      are aborted, for servers that name one version a reply.
    deadline: seconds that one server may take to load.

  Returns:
    For each server why it could not be reached; None where it has them.

  Raises:
    types.EngineError: a server that did not load them or serves others; says
      what each one serves.
  """
  outcomes = await asyncio.gather(
    *(
      _update(server, path, tag, in_place=in_place, deadline=deadline)
      for server in servers
    ),
    return_exceptions=True,
  )
  for outcome in outcomes:
    if outcome is None or isinstance(outcome, sglang_server.UnansweredError):
      continue
    if not isinstance(outcome, types.EngineError):
      raise outcome
    served = await asyncio.gather(*(_served(server) for server in servers))
    raise types.EngineError(
      f"Weights {tag} did not reach every server: {outcome} Now "
      f"{'; '.join(served)}."
    )
  return outcomes


async def version(server: sglang_server.Server) -> str:
  """The name of the weights that a server says it has."""
  info = await server.get("/model_info", "/get_model_info")
  found = info.get("weight_version")
  if not isinstance(found, str):
    raise server.error(
      f"found weight_version {found!r} in its model_info, expected a name; "
      "requirements-sglang.txt has a version that tells it."
    )
  return found


async def score(
  server: sglang_server.Server,
  token_ids: Sequence[int],
  *,
  name: str,
  deadline: float,
) -> list[float]:
  """Log-probabilities of all tokens but the first, at temperature 1.

  Raises:
    types.EngineError: the server cannot be asked, or has other weights than
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
    # Paused, it would hang whoever comes next, even if this run ends here.
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
  if done.get("success") is True:  # It may have been started again meanwhile.
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
  """Pauses a server and has it load; what it says to that."""
  mode = {"mode": "in_place" if in_place else "abort"}
  await server.post("/pause_generation", mode, deadline=deadline)
  done = await server.post(
    "/update_weights_from_disk",
    {
      "model_path": str(path),
      "weight_version": tag,
      # It would fail, the weights already changed, where requests run.
      "flush_cache": not in_place,
    },
    deadline=deadline,
  )
  if in_place:
    # Prefixes of the old weights go where no request runs. Elsewhere they are
    # never found again, because requests name the weights of theirs, and leave
    # when room is needed.
    with contextlib.suppress(types.EngineError):
      await server.tell("POST", "/flush_cache")
  return done


async def _served(server: sglang_server.Server) -> str:
  try:
    return f"{server.url} serves {await version(server)!r}"
  except types.EngineError as error:
    return f"{server.url} does not say what it serves ({error})"
