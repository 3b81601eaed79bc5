"""A fake SGLang server in this process, with the interface of a real one.

It generates what a script says, token by token, and behaves like version
0.5.23. A stop text is searched in the last n + 1 tokens, where n is its length
when encoded. The returned ids end with the token that completes it. An update
of the weights waits for running requests, unless the server is paused. It dies
where a real one on a GPU does: over a release while a request runs, a second
release or resume, and whatever needs memory that it has released. Tests inject
faults.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import http.server
import json
import os
import pathlib
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import policy_scores
import safetensors.numpy
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from anysearch_jax.policy import hf
from anysearch_jax.policy import tokenizer as tokenizer_lib

PIECES = ["</search>", "</answer>", "</", "<", "/", "se", "arch", "search"]
PIECES += ["answer", ">", ">\n", "a", "b", "c", " ", "\n"]
END, VOCAB = len(PIECES), len(PIECES) + 4  # Two rows have no token.
CONTEXT = 64


@functools.cache
def tokenizer() -> tokenizer_lib.Tokenizer:
  """Returns a tokenizer of `PIECES`, longest first, `<end>` and `<pad>`."""
  inner = tokenizers.Tokenizer(
    models.WordLevel(
      {text: i for i, text in enumerate([*PIECES, "<end>", "<pad>"])}, "a"
    )
  )
  longest = sorted(PIECES, key=len, reverse=True)
  inner.pre_tokenizer = pre_tokenizers.Split(
    tokenizers.Regex("|".join(map(re.escape, longest))), "isolated"
  )
  inner.decoder = decoders.Fuse()
  return tokenizer_lib.Tokenizer(
    transformers.PreTrainedTokenizerFast(
      tokenizer_object=inner, eos_token="<end>", pad_token="<pad>"
    )
  )


def ids(*texts: str) -> tuple[int, ...]:
  """Returns the id of each text, which must be a piece."""
  return tuple(END if t == "<end>" else PIECES.index(t) for t in texts)


def logp(place: int) -> float:
  """Returns the log-probability of the token sampled at a place."""
  return -(place + 1) / 64


def routed(tokens: Sequence[int]) -> np.ndarray:
  """Returns the experts of tokens in two layers, two of six each."""
  first = np.asarray(tokens, np.int32)[:, None] + [0, 1]
  return np.stack([first % 6, (first + 1) % 6], -1).astype(np.int32)


# What a server with a memory saver can release.
MEMORY = {"weights", "kv_cache", "cuda_graph"}


class _Request:
  """A request that runs; it is aborted once its client has left."""

  def __init__(self, rid: str, connection: socket.socket | None):
    self.rid, self.connection = rid, connection
    self.aborted = False
    self.versions: list[str] = []

  @property
  def is_aborted(self) -> bool:
    if self.connection is not None and not self.aborted:
      try:
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
        self.aborted = self.connection.recv(1, flags) == b""
      except BlockingIOError:
        pass  # The client waits.
      except OSError:
        self.aborted = True
    return self.aborted


class Server:
  """A server on its own port; a context manager.

  Args:
    script: the text generated for a context; endless " " follow it.
    seconds: seconds between tokens.

  Attributes:
    url: address of the server.
    asked: paths and bodies of requests in order; `bodies(path)` returns those
      of one path.
    faults: by path, what happens to the next requests instead of an answer:
      a status and a text, "die", "hang", or a function of the right reply.
    version: version of the weights; may be set.
    policy: the weights that were loaded last, used for scoring; may be set.
    hold_at: tokens after which the next request waits for other weights.
    running: requests that are being generated.
    last_paused: mode of the last pause.
    away: the memory that it has released.
    saver: whether it has a memory saver.
    routed: whether it returns experts.
    lora: the flags of its server_info, {} without adapters.
    adapters: the loaded ones, by name, as policies merged with the base.
    serves_base: whether it scores its base whatever adapter is named.
    died: what it died of.
    workers: that it lists, if it stands for an smg gateway.
  """

  SAMPLING = ("/generate",)  # Paths whose requests end with their connection.

  def __init__(
    self,
    script: Callable[[Sequence[int]], Sequence[int]] | Sequence[int] = (),
    *,
    seconds: float = 0.0,
  ):
    self._script = script if callable(script) else lambda context: script
    self._seconds = seconds
    self._state = threading.Condition()
    self._paused, self.policy = "", None
    self._cache: list[tuple[str, tuple[int, ...]]] = []
    self.version, self.last_paused, self.hold_at = "default", "", -1
    self.away: set[str] = set()
    self.saver, self.died, self.routed = True, "", True
    self.workers: list[dict[str, Any]] = []
    self.lora: dict[str, Any] = {}
    self.adapters: dict[str, hf.Policy] = {}
    self.serves_base, self._base = False, None
    self.running: dict[str, _Request] = {}
    self.asked: list[tuple[str, dict]] = []
    self.faults: dict[str, list] = collections.defaultdict(list)
    self._bind(0)
    self.url = f"http://127.0.0.1:{self._http.server_port}"

  def _bind(self, port: int) -> None:
    self._released = threading.Event()
    self._connections: list[socket.socket] = []
    handler = type(
      "Handler", (_Handler,), {"fake": self, "released": self._released}
    )
    self._http = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    self._http.daemon_threads = True

  def __enter__(self) -> Server:
    threading.Thread(
      target=self._http.serve_forever, args=(0.01,), daemon=True
    ).start()
    return self

  def __exit__(self, *error: object) -> None:
    self._released.set()
    self._http.shutdown()
    self._http.server_close()

  def kill(self) -> None:
    """Ends it like `kill -9`: open requests get no answer."""
    self.__exit__()
    for connection in self._connections:
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with self._state:
      for request in self.running.values():
        request.aborted = True
      self._state.notify_all()

  def restart(self) -> None:
    """Restarts it at the same address, with the weights of its folder."""
    self._bind(self._http.server_port)
    with self._state:
      self.version, self._paused, self.running = "default", "", {}
      self.away.clear()
      self.adapters.clear()
      self._cache.clear()
    self.__enter__()

  def bodies(self, path: str) -> list[dict]:
    return [body for asked, body in self.asked if asked == path]

  def note(self, path: str, body: dict) -> None:
    with self._state:
      self.asked.append((path, body))
      self._state.notify_all()

  def wait_until(self, holds: Callable[[], bool], seconds: float = 10.0):
    """Waits until `holds()` is true, which other threads bring about."""
    with self._state:
      assert self._state.wait_for(holds, seconds)

  def answer(self, path: str, body: dict) -> tuple[int, Any]:
    """Returns a status, and a value to send as JSON or a text to send as is."""
    name = path.strip("/").split("?")[0].replace("/", "_")
    method = getattr(self, "_" + name, None)
    return method(body) if method else (404, {"detail": "Not Found"})

  def needs(self, held: bool, why: str) -> None:
    """Dies, and raises ConnectionAbortedError, unless `held`."""
    if not held:
      self.died = why
      self.kill()
      raise ConnectionAbortedError(why)

  def _release_memory_occupation(self, body: dict) -> tuple[int, Any]:
    self.needs(not self.running, "released while a request ran")
    self.needs(not self.away & set(body["tags"]), "released twice")
    self.away |= set(body["tags"])
    return 200, None

  def _resume_memory_occupation(self, body: dict) -> tuple[int, Any]:
    self.needs(self.away >= set(body["tags"]), "resumed twice")
    self.away -= set(body["tags"])
    if "weights" in body["tags"]:
      self.policy = None  # Their memory is new.
    return 200, None

  def _update_weight_version(self, body: dict) -> tuple[int, Any]:
    self.version = body["new_version"]
    return 200, {"success": True, "new_version": self.version}

  def _health(self, body: dict) -> tuple[int, Any]:
    if self._paused:
      return 503, ""
    self.needs(not self.away, "generated without memory")
    return 200, ""

  def _model_info(self, body: dict) -> tuple[int, Any]:
    return 200, {"model_path": "policy", "weight_version": self.version}

  def _server_info(self, body: dict) -> tuple[int, Any]:
    return 200, {"version": "0.5.23", "max_req_input_len": CONTEXT - 6} | {
      "enable_memory_saver": self.saver,
      "enable_return_routed_experts": self.routed,
    } | self.lora

  def _v1_rl_workers(self, body: dict) -> tuple[int, Any]:
    return 200, {"workers": self.workers}

  def _v1_models(self, body: dict) -> tuple[int, Any]:
    loaded = [{"id": name, "parent": "policy"} for name in self.adapters]
    return 200, {"data": [{"id": "policy", "parent": None}, *loaded]}

  def _load_lora_adapter(self, body: dict) -> tuple[int, Any]:
    name, error = body["lora_name"], ""
    if not self.lora:
      error = "LoRA is not enabled."
    elif name in self.adapters:
      error = f"LoRA with name {name} already exists."
    if error:
      return 400, {"success": False, "error_message": error}
    merged = _merged(self._base, pathlib.Path(body["lora_path"]))
    with self._state:
      self.adapters[name] = merged
    return 200, {"success": True, "error_message": ""}

  def _unload_lora_adapter(self, body: dict) -> tuple[int, Any]:
    with self._state:
      self.adapters.pop(body["lora_name"])
    return 200, {"success": True, "error_message": ""}

  def _pause_generation(self, body: dict) -> tuple[int, Any]:
    with self._state:
      mode = body.get("mode", "abort")
      self._paused = self.last_paused = mode
      if mode == "abort":
        for request in self.running.values():
          request.aborted = True
        self._state.notify_all()
        assert self._state.wait_for(lambda: not self.running, 10)
    return 200, {"message": "Generation paused successfully.", "status": "ok"}

  def _continue_generation(self, body: dict) -> tuple[int, Any]:
    with self._state:
      self._paused = ""
      self._state.notify_all()
    return 200, {"message": "Generation continued.", "status": "ok"}

  def _flush_cache(self, body: dict) -> tuple[int, Any]:
    with self._state:
      if self.running:
        return 400, "Flush cache failed.\n"
      self._cache.clear()
    return 200, "Cache flushed.\n"

  def _update_weights_from_disk(self, body: dict) -> tuple[int, Any]:
    folder = pathlib.Path(body["model_path"])
    self.needs("weights" not in self.away, "loaded without memory")
    try:
      policy = hf.load(folder)
    except (OSError, ValueError) as error:
      message = f"Failed to get weights iterator: {error}."
      return 400, {"success": False, "message": message}
    with self._state:
      if not self._paused:
        assert self._state.wait_for(lambda: not self.running, 10)
      self.policy, self._base = policy, folder
      if body["flush_cache"] and self.running:
        message = "Weights were updated, but the cache was not flushed."
        return 400, {"success": False, "message": message}
      if body["flush_cache"]:
        self._cache.clear()
      self.version = body["weight_version"]
    message = "Succeeded to update model weights."
    return 200, {"success": True, "message": message, "num_paused_requests": 0}

  def _generate(self, body: dict) -> tuple[int, Any]:
    context, params = body["input_ids"], body["sampling_params"]
    most = params.get("max_new_tokens", 128)
    if type(most) is not int:
      return 400, {"error": f"invalid type: {most!r}, expected i64"}
    if not context or len(context) + most > CONTEXT:
      message = "Requested token count exceeds the model's context length."
      return 400, {"error": {"message": message}}
    assert max(context) < VOCAB, "this token would have killed the server"
    adapter = body.get("lora_path")
    if adapter and adapter not in self.adapters:
      message = f"Got LoRA adapter that has never been loaded: {adapter}\n"
      return 400, {"error": {"message": message}}
    request = _Request(uuid.uuid4().hex, body.get("connection"))
    with self._state:
      self._state.wait_for(lambda: not self._paused)
      self.needs(not self.away, "generated without memory")
      self.running[request.rid] = request
      self._state.notify_all()
      cached = self._take_prefix(body.get("extra_key", ""), context)
    try:
      sampled, reason = self._sample(request, context, params, most)
    finally:
      with self._state:
        self.running.pop(request.rid, None)
        self._state.notify_all()
    meta = {
      "id": request.rid,
      "finish_reason": reason,
      "prompt_tokens": len(context),
      "completion_tokens": len(sampled),
      "cached_tokens": cached if "return_logprob" in body else 0,
      "weight_version": self.version,
      "weight_versions": _spans(request.versions or [self.version]),
      "input_token_logprobs": [],
      "output_token_logprobs": [
        [logp(i), token, None] for i, token in enumerate(sampled)
      ],
    }
    if body["logprob_start_len"] == 0:
      # Of the weights that were loaded last, whatever they are called.
      scored = self.policy
      if adapter and not self.serves_base:
        scored = self.adapters[adapter]
      scores = [None, *policy_scores.log_probs(scored, context)]
      meta["input_token_logprobs"] = [
        [score, token, None]
        for score, token in zip(scores, context, strict=True)
      ]
    if not sampled:
      meta["weight_versions"][0]["end"] = 0
    if body.get("return_routed_experts") and self.routed:
      newest = (context + list(sampled))[body["routed_experts_start_len"] : -1]
      meta["routed_experts"] = base64.b64encode(routed(newest)).decode()
    text = tokenizer().decode(sampled)
    return 200, {"text": text, "output_ids": sampled, "meta_info": meta}

  def _sample(
    self, request: _Request, context: list[int], params: dict, most: int
  ) -> tuple[list[int], dict]:
    script = iter(self._script(context))
    sampled: list[int] = []
    while len(sampled) < most:
      if self._seconds:
        time.sleep(self._seconds)
      with self._state:
        self._state.notify_all()
        self._state.wait_for(lambda: self._may_go_on(request))
        if len(sampled) == self.hold_at:
          self.hold_at = -1
        if request.is_aborted:
          return sampled, {"type": "abort", "message": "Aborted"}
        sampled.append(next(script, PIECES.index(" ")))
        request.versions.append(self.version)
      if (matched := _stopped(sampled, params)) is not None:
        return sampled, {"type": "stop", "matched": matched}
    return sampled, {"type": "length", "length": most}

  def _may_go_on(self, request: _Request) -> bool:
    done = request.versions
    held = len(done) == self.hold_at and done[-1] == self.version
    return request.is_aborted or not (self._paused or held)

  def _take_prefix(self, key: str, context: list[int]) -> int:
    """Returns how many tokens are cached, and caches the whole context."""
    found = 0
    for cached_key, cached in self._cache:
      if cached_key == key:
        prefix = os.path.commonprefix([list(cached), context[:-1]])
        found = max(found, len(prefix))
    self._cache.append((key, tuple(context)))
    return found


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True
  fake: Server
  released: threading.Event

  def setup(self) -> None:
    super().setup()
    self.fake._connections.append(self.connection)

  def do_GET(self) -> None:
    self._answer({})

  def do_POST(self) -> None:
    length = int(self.headers.get("Content-Length") or 0)
    self._answer(json.loads(self.rfile.read(length) or b"{}"))

  def log_message(self, *args: object) -> None:
    pass

  def _answer(self, body: dict) -> None:
    self.fake.note(self.path, body)
    faults = self.fake.faults[self.path]
    fault = faults.pop(0) if faults else None
    if fault == "die" or self.released.is_set():
      self.close_connection = True
      return
    if fault == "hang":
      self.released.wait()
      return
    if isinstance(fault, tuple):
      status, value = fault
    else:
      try:
        asked = body
        if self.path in self.fake.SAMPLING:
          asked = body | {"connection": self.connection}
        status, value = self.fake.answer(self.path, asked)
      except ConnectionAbortedError:
        self.close_connection = True
        return
      value = fault(value) if fault else value
    content = value if isinstance(value, str) else json.dumps(value)
    try:
      self.send_response(status)
      self.send_header("Content-Length", str(len(content.encode())))
      self.end_headers()
      self.wfile.write(content.encode())
    except OSError:
      pass  # The client has left.


def _merged(base: pathlib.Path, adapter: pathlib.Path) -> hf.Policy:
  """Returns a folder's policy with W + alpha / r B A, as PEFT defines it."""
  config = json.loads((adapter / "adapter_config.json").read_text())
  scale = config["lora_alpha"] / config["r"]
  load = safetensors.numpy.load_file
  factors = load(adapter / "adapter_model.safetensors")
  weights = load(base / "model.safetensors")
  for name in [n for n in factors if ".lora_A." in n]:
    a, b = factors[name], factors[name.replace("lora_A", "lora_B")]
    key = name.removeprefix("base_model.model.").replace(".lora_A", "")
    product = b.astype(np.float32) @ a.astype(np.float32)
    weights[key] = weights[key].astype(np.float32) + scale * product
  with tempfile.TemporaryDirectory() as folder:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    safetensors.numpy.save_file(weights, f"{folder}/model.safetensors")
    return hf.load(folder)


def _stopped(sampled: list[int], params: dict) -> int | str | None:
  """Returns the token, text or expression that ends the request here."""
  if sampled[-1] in params.get("stop_token_ids", ()) or sampled[-1] == END:
    return sampled[-1]
  decode, encode = tokenizer().decode, tokenizer().encode
  for stop in params.get("stop", ()):
    if stop in decode(sampled[-len(encode(stop)) - 1 :]):
      return stop
  for pattern in params.get("stop_regex", ()):
    if re.search(pattern, decode(sampled[-len(pattern) - 1 :])):
      return pattern
  return None


def _spans(versions: list[str]) -> list[dict]:
  edges = [
    i for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]
  ] + [len(versions)]
  return [
    {"version": versions[start], "start": start, "end": end}
    for start, end in zip(edges, edges[1:], strict=False)
  ]
