"""Question files of the Hugging Face hub, by repository and commit."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(ValueError):
  """The hub does not give what is asked for."""


class Hub(Protocol):
  """What is asked of the hub; `HuggingFace` is the real one."""

  def commit(self, repository: str, revision: str) -> str:
    """The commit that a branch or tag stands for now."""
    ...

  def download(self, repository: str, commit: str, name: str) -> pathlib.Path:
    """A file of a commit."""
    ...


class HuggingFace:
  """Dataset repositories, through `huggingface_hub` and its cache."""

  def commit(self, repository: str, revision: str) -> str:
    import huggingface_hub

    found = huggingface_hub.HfApi().dataset_info(repository, revision=revision)
    return found.sha

  def download(self, repository: str, commit: str, name: str) -> pathlib.Path:
    import huggingface_hub

    return pathlib.Path(
      huggingface_hub.hf_hub_download(
        repository, name, revision=commit, repo_type="dataset"
      )
    )


class Snapshot(NamedTuple):
  """Files of one commit, in the order in which they were asked for."""

  commit: str
  paths: list[pathlib.Path]


def fetch(
  repository: str, revision: str, names: Sequence[str], *, hub: Hub
) -> Snapshot:
  """Downloads files of a revision.

  A full commit needs no network where its files are in the cache.

  Args:
    repository: `<owner>/<name>` of a dataset.
    revision: commit, tag or branch.
    names: paths in the repository.
    hub: who is asked.

  Raises:
    HubError: no network, no such repository, revision or file.
  """
  asked, commit, paths = f"revision {revision!r}", revision, []
  try:
    if not _COMMIT.fullmatch(revision):
      commit = hub.commit(repository, revision)
    for asked in names:
      paths.append(hub.download(repository, commit, asked))
  # Its errors share no other class; their texts name the cause.
  except Exception as error:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raise HubError(
      f"{repository}, {asked}: {lines[0]} Correct the name, or download the "
      "files elsewhere and name their folder."
    ) from error
  return Snapshot(commit, paths)
