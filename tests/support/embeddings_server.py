"""A server of `/v1/embeddings` over HTTP, whose vectors follow from words.

Texts with a common word, or with words of one synonym set, are near.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator

import numpy as np
import web_site

SYNONYMS = {"kitten": "cat", "automobile": "car", "sofa": "couch"}


def vector(text: str, dim: int) -> list[float]:
  """Returns the sum of the directions of a text's words."""
  total = np.zeros(dim)
  for word in re.findall(r"\w+", text.lower()):
    name = SYNONYMS.get(word, word)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    total += np.random.default_rng(seed).normal(size=dim)
  return total.tolist()


@dataclasses.dataclass
class Server:
  """What a server is and was asked.

  Attributes:
    models: names of its models.
    dim: width of its vectors.
    longest: the most characters of a text that it takes.
    texts: all texts that it was asked for, by request.
    keys: the Authorization headers.
  """

  models: tuple[str, ...] = ("tiny-embed",)
  dim: int = 32
  longest: int = 10_000
  texts: list[list[str]] = dataclasses.field(default_factory=list)
  keys: list[str] = dataclasses.field(default_factory=list)
  url: str = ""

  @property
  def asked(self) -> list[str]:
    """All texts but the probe of the dimension."""
    texts = itertools.chain.from_iterable(self.texts)
    return [text for text in texts if text != "dimension"]


@contextlib.contextmanager
def served(**settings) -> Iterator[Server]:
  """Starts a server; `settings` are fields of `Server`."""
  server = Server(**settings)

  def embeddings(handler):
    body = json.loads(handler.body)
    texts = body["input"]
    server.texts.append(texts)
    server.keys.append(handler.headers.get("Authorization", ""))
    status = 200
    reply = {
      "data": [
        {"index": i, "embedding": vector(text, server.dim)}
        for i, text in reversed([*enumerate(texts)])
      ]
    }
    if body["model"] not in server.models:
      status = 404
      reply = {"error": {"message": f"no model {body['model']}"}}
    elif max(map(len, texts)) > server.longest:
      status = 500
      reply = {"error": {"message": "input is too large to process"}}
    data = json.dumps(reply).encode()
    web_site.reply(status, data, kind="application/json")(handler)

  with web_site.Site("127.0.0.1") as site:
    models = {"data": [{"id": name} for name in server.models]}
    site.pages["/v1/models"] = web_site.reply(200, json.dumps(models).encode())
    site.post = embeddings
    server.url = f"{site.origin}/v1"
    yield server
