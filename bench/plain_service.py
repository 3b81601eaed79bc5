"""The search service that one writes first; a measure for ours.

FastAPI, pydantic, and a `def` endpoint on a thread that searches for its
request alone. The protocol is Search-R1's.
"""

from __future__ import annotations

import fastapi
import pydantic

from retrieval.index import search


class Request(pydantic.BaseModel):
  """Search-R1's."""

  queries: list[str]
  topk: int | None = None
  return_scores: bool = False


def create_app(index: search.PassageSearch) -> fastapi.FastAPI:
  """The service around an index."""
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
