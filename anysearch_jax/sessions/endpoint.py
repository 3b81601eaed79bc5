"""The OpenAI endpoint of a training, through which programs play its policy.

    POST /sessions/{id}/v1/chat/completions   see `chat_api`
    POST /sessions/{id}/v1/responses          see `responses_api`
    GET  /sessions/{id}/v1/models             the policy's name
    POST /sessions/{id}/outcome               the program's report, at its end

Each session has a key, which its requests bear. Errors have OpenAI's form:

    400   a field cannot be honoured
    401   the session is unknown or has ended, or the key is not its own
    404   unknown path
    408   the body came too slowly
    413   the body is too large
    429   the budget is spent, or the session has too many requests at a time
    500   a bug
    503   the engine could not sample, or the training stops

All but 408 tell OpenAI's clients not to repeat the request.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from types import ModuleType
from typing import Annotated, Any

import pydantic
from starlette import exceptions, requests, responses

from anysearch_jax import types
from anysearch_jax.host import http_server, openai_replies
from anysearch_jax.sessions import chat_api, fields, responses_api, turns

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 2**23
_BODY_SECONDS = 30.0  # Until the whole body must have arrived.
_HEADER_SECONDS = 30.0
_MAX_REQUESTS = 8  # Of a session, at a time.
_MAX_ANSWER_CHARACTERS = 200_000
_CLOSE_SECONDS = 2  # For clients that have not read their answers.
_APIS = {"v1/chat/completions": chat_api, "v1/responses": responses_api}
_PATHS = [*_APIS, "v1/models", "outcome"]
_NO_RETRY = {"x-should-retry": "false"}
# What a refusal is counted as, by its HTTP status, if it has no code.
_EVENTS = {408: "slow_body", 413: "large_body", 499: "client_left"}


class _Report(pydantic.BaseModel):
  """The body of `POST outcome`."""

  model_config = pydantic.ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False
  )

  answer: (
    Annotated[str, pydantic.Field(max_length=_MAX_ANSWER_CHARACTERS)] | None
  ) = None
  reward: float | None = None


class Endpoint:
  """An ASGI app over sessions, and the server that listens for it.

  Args:
    sessions: the open sessions; their methods are called in the event loop.
    model: name of the policy, for programs that list the models.
    connections: limit on the connections at a time.
    seconds: time from a request's headers until its answer has been read.
  """

  def __init__(
    self,
    sessions: turns.Sessions,
    *,
    model: str,
    connections: int = 1024,
    seconds: float = 3600.0,
  ):
    self._sessions = sessions
    self._model = model
    self._guard = http_server.Guard(
      max_connections=connections,
      headers=_HEADER_SECONDS,
      request=seconds,
      on_closed=lambda reason: sessions.note(f"connection_{reason}"),
    )
    self._server: http_server.InnerServer | None = None
    self._is_closing = False
    self._turns: set[asyncio.Future[turns.TurnReply]] = set()
    # Requests under way, by session.
    self._running: collections.Counter[str] = collections.Counter()
    # Compared if there is no session, which then takes the same time.
    self._no_key = secrets.token_urlsafe()

  async def open(self, host: str, port: int = 0) -> str:
    """Listens in the running event loop.

    Args:
      host: address to listen at.
      port: TCP port; 0 takes any free one.

    Returns:
      The base URL; `sessions/{id}/v1` below it is the one of a session.

    Raises:
      ValueError: the address is not free, or the process may open too few
        files.
    """
    limit, _ = http_server.connection_limit(self._guard.max_connections)
    self._guard.max_connections = limit
    config = self._guard.config(self)
    config.timeout_graceful_shutdown = _CLOSE_SECONDS
    listener = http_server.listening(host, port)
    url = http_server.address(listener)
    self._server = http_server.InnerServer(config)
    await self._server.open(listener)
    return url

  async def close(self) -> None:
    """Ends the turns under way with 503 and stops listening."""
    self._is_closing = True
    for turn in self._turns:
      turn.cancel()
    if self._server is not None:
      await self._server.close()

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Answers a request."""
    if scope["type"] != "http":
      return
    request = requests.Request(scope, receive)
    with contextlib.ExitStack() as on_end:
      response = await self._response(request, on_end)
      await response(scope, receive, send)

  async def _response(
    self, request: requests.Request, on_end: contextlib.ExitStack
  ) -> responses.Response:
    """Returns the response to a request, which may be a refusal.

    Args:
      request: a request whose body has not been read.
      on_end: closed when the response has been sent.
    """
    session = None
    root, _, path = request.scope["path"].partition("/sessions/")
    session_id, _, name = path.partition("/")
    try:
      if root or not name:
        raise _unknown_path()
      session = self._session(session_id, request.headers)
      request.state.session_id = session_id
      on_end.enter_context(self._place(session_id))
      response = await self._answer(session, name, request)
    except (Exception, asyncio.CancelledError) as error:
      task = asyncio.current_task()
      if task is not None and task.cancelling():
        raise
      response = self._error_response(error, session_id)
    if session is not None:
      response.headers.update(session.budget_headers())
    return response

  async def _answer(
    self, session: turns.Session, name: str, request: requests.Request
  ) -> responses.Response:
    match request.method, name:
      case "GET", "v1/models":
        model = openai_replies.model_values(self._model)
        return http_server.json_response({"object": "list", "data": [model]})
      case "POST", "outcome":
        return await self._report(session, request)
      case "POST", name if name in _APIS:
        return await self._turn(_APIS[name], session, request)
    raise _unknown_path()

  async def _report(
    self, session: turns.Session, request: requests.Request
  ) -> responses.Response:
    body = await self._body(request)
    report = fields.read(_Report, body)
    session.report(turns.Report(report.answer, report.reward))
    return http_server.json_response({"object": "session.outcome"})

  async def _turn(
    self, api: ModuleType, session: turns.Session, request: requests.Request
  ) -> responses.Response:
    body = await self._body(request)
    parsed = fields.read(api.Request, body)
    turn = parsed.turn()
    if self._is_closing:
      raise _stopping()
    sampling = asyncio.ensure_future(session.turn(turn))
    self._turns.add(sampling)
    sampling.add_done_callback(self._turns.discard)
    if not parsed.stream:
      reply = await http_server.unless_gone(request.receive, sampling)
      return http_server.json_response(api.collected(parsed, reply))
    seconds = openai_replies.HEARTBEAT_SECONDS
    try:
      await http_server.unless_gone(
        request.receive, asyncio.wait({sampling}, timeout=seconds)
      )
    except BaseException:
      await _cancel(sampling)
      raise
    # A turn that is refused at once has the refusal's status.
    if sampling.done():
      return openai_replies.events_response(
        _frames(api, parsed, sampling.result())
      )
    chunks = self._chunks(api, parsed, sampling, request.state.session_id)
    return openai_replies.EventStream(chunks)

  async def _chunks(
    self,
    api: ModuleType,
    parsed: fields.Request,
    sampling: asyncio.Future[turns.TurnReply],
    session_id: str,
  ) -> AsyncGenerator[bytes]:
    """Yields the bytes of a stream whose turn is still sampled."""
    try:
      while not sampling.done():
        yield openai_replies.HEARTBEAT
        seconds = openai_replies.HEARTBEAT_SECONDS
        await asyncio.wait({sampling}, timeout=seconds)
      if sampling.cancelled():
        raise _stopping()
      yield _frames(api, parsed, sampling.result())
    except Exception as error:
      _, values = self._refusal(error, session_id)
      yield openai_replies.frame(api.refused(values))
    finally:
      if not sampling.done():  # The client has left.
        self._sessions.note("client_left", session_id)
        await _cancel(sampling)

  async def _body(self, request: requests.Request) -> bytes:
    return await http_server.body(
      request, limit=_MAX_BODY_BYTES, seconds=_BODY_SECONDS
    )

  def _session(
    self, session_id: str, headers: Mapping[str, str]
  ) -> turns.Session:
    """Returns the session of a request with its key.

    The refusals of a wrong key and of an unknown session are the same, so ids
    cannot be guessed.
    """
    session = self._sessions.find(session_id)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    expected_key = self._no_key if session is None else session.key
    is_equal = hmac.compare_digest(key.strip().encode(), expected_key.encode())
    if not is_equal:
      self._sessions.intruded(key.strip())
    if session is None or not is_equal or scheme.lower() != "bearer":
      raise turns.RefusedError(
        "Found no open session of this address and key, expected the address "
        "and the key that the program got at its start. The session may have "
        "ended.",
        status=401,
        kind="authentication_error",
        code="unknown_session" if session is None else "wrong_key",
      )
    return session

  @contextlib.contextmanager
  def _place(self, session_id: str) -> Iterator[None]:
    """Counts a request of a session while it is under way."""
    if self._running[session_id] >= _MAX_REQUESTS:
      raise turns.RefusedError(
        f"Found {_MAX_REQUESTS} requests of this session under way, expected "
        "fewer; wait for one to end.",
        status=429,
        kind="rate_limit_error",
        code="too_many_requests",
      )
    self._running[session_id] += 1
    try:
      yield
    finally:
      self._running[session_id] -= 1
      if not self._running[session_id]:
        del self._running[session_id]

  def _error_response(
    self, error: BaseException, session_id: str
  ) -> responses.Response:
    status, values = self._refusal(error, session_id)
    headers = None if status == 408 else _NO_RETRY
    return http_server.json_response({"error": values}, status, headers)

  def _refusal(
    self, error: BaseException, session_id: str
  ) -> tuple[int, dict[str, Any]]:
    """Counts an error; returns its HTTP status and its JSON."""
    if isinstance(error, exceptions.HTTPException):
      event = _EVENTS.get(error.status_code, "invalid_request")
      self._sessions.note(event, session_id)
      return error.status_code, openai_replies.error_of(error)
    refused = _refused(error, session_id)
    # Whoever has no key is not the session's program.
    program_id = "" if refused.status == 401 else session_id
    self._sessions.note(refused.code or refused.kind, program_id)
    code = "invalid_api_key" if refused.status == 401 else refused.code
    return refused.status, {
      "message": refused.message,
      "type": refused.kind,
      "param": refused.param or None,
      "code": code or None,
    }


def _refused(error: BaseException, session_id: str) -> turns.RefusedError:
  """Returns an error in the API's terms; logs what the program is not told."""
  if isinstance(error, turns.RefusedError):
    return error
  if isinstance(error, asyncio.CancelledError):
    return _stopping()
  if isinstance(error, types.EngineError):
    _log.warning(
      "Session %s: the engine could not sample: %s", session_id, error
    )
    return turns.RefusedError(
      "The engine could not sample this turn; the training's log says why.",
      status=503,
      kind="server_error",
      code="engine_error",
    )
  _log.error("Session %s: a request failed.", session_id, exc_info=error)
  return turns.RefusedError(
    "The endpoint failed; the training's log says why.",
    status=500,
    kind="server_error",
    code="endpoint_error",
  )


def _stopping() -> turns.RefusedError:
  return turns.RefusedError(
    "The training ended this turn and samples no more of them here.",
    status=503,
    kind="server_error",
    code="stopping",
  )


def _unknown_path() -> turns.RefusedError:
  paths = ", ".join(_PATHS)
  return turns.RefusedError(
    f"Found no such path, expected /sessions/ID/ and one of {paths}.",
    status=404,
    code="unknown_path",
  )


def _frames(
  api: ModuleType, parsed: fields.Request, reply: turns.TurnReply
) -> bytes:
  """Returns the server-sent events of a turn."""
  return (
    b"".join(map(openai_replies.frame, api.streamed(parsed, reply))) + api.LAST
  )


async def _cancel(sampling: asyncio.Future[turns.TurnReply]) -> None:
  """Cancels a turn and waits for its end."""
  sampling.cancel()
  await asyncio.gather(sampling, return_exceptions=True)
