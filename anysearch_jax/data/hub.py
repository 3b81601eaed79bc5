"""Downloads question files from the Hugging Face hub."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(ValueError):
  """The hub cannot provide a repository, revision or file."""


class Hub(Protocol):
  """The interface to the hub; `HuggingFace` is the real implementation."""

  def commit(self, repository: str, revision: str) -> str:
    """Returns the commit to which a branch or tag points now."""
    ...

  def download(self, repository: str, commit: str, name: str) -> pathlib.Path:
    """Downloads a file of a commit and returns its local path."""
    ...


class HuggingFace:
  """Dataset repositories, through `huggingface_hub` and its cache."""

  def commit(self, repository: str, revision: str) -> str:
    import huggingface_hub

    found = huggingface_hub.HfApi().dataset_info(repository, revision=revision)
    if found.sha is None:
      raise ValueError(
        f"{repository}: the hub named no commit for revision {revision!r}; "
        "expected one. Check the name of the data set and of the revision."
      )
    return found.sha

  def download(self, repository: str, commit: str, name: str) -> pathlib.Path:
    import huggingface_hub

    return pathlib.Path(
      huggingface_hub.hf_hub_download(
        repository, name, revision=commit, repo_type="dataset"
      )
    )


class Snapshot(NamedTuple):
  """Files of one commit, in the order in which they were requested."""

  commit: str
  paths: list[pathlib.Path]


def fetch(
  repository: str, revision: str, names: Sequence[str], *, hub: Hub
) -> Snapshot:
  """Downloads files of a revision.

  A full commit needs no network if its files are in the cache.

  Args:
    repository: `<owner>/<name>` of a dataset.
    revision: commit, tag or branch.
    names: paths in the repository.
    hub: the hub to download from.

  Raises:
    HubError: there is no network, or the repository, revision or file does not
      exist.
  """
  asked, commit, paths = f"revision {revision!r}", revision, []
  try:
    if not _COMMIT.fullmatch(revision):
      commit = hub.commit(repository, revision)
    for asked in names:
      paths.append(hub.download(repository, commit, asked))
  # The hub's errors share no narrower base class; the message names the cause.
  except Exception as error:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raise HubError(
      f"{repository}, {asked}: {lines[0]} Correct the name, or download the "
      "files elsewhere and name their folder."
    ) from error
  return Snapshot(commit, paths)
