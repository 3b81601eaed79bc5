"""A straightforward search service, the baseline for `retrieval/service`.

It uses FastAPI, pydantic and a `def` endpoint, which searches on a thread for
its own request only. The protocol is Search-R1's.
"""

from __future__ import annotations

import fastapi
import pydantic

from retrieval.index import search


class Request(pydantic.BaseModel):
  """Search-R1's request."""

  queries: list[str]
  topk: int | None = None
  return_scores: bool = False


def create_app(index: search.SearchIndex) -> fastapi.FastAPI:
  """Returns the service around an index."""
  app = fastapi.FastAPI()

  @app.post("/retrieve")
  def retrieve(request: Request):
    result = []
    for some in index.search(request.queries, request.topk or 3):
      items = [
        {"document": {"id": p.id, "contents": p.contents}, "score": p.score}
        for p in some
      ]
      result.append(
        items if request.return_scores else [i["document"] for i in items]
      )
    return {"result": result}

  return app
