"""Configurations and findings that the doctor's tests share."""

from __future__ import annotations

import dataclasses

from configs import quickstart

CONFIG = quickstart.get_config()


def with_(config=CONFIG, **groups):
  """Returns the configuration with values of its groups changed."""
  return dataclasses.replace(
    config,
    **{
      name: dataclasses.replace(getattr(config, name), **values)
      for name, values in groups.items()
    },
  )


def levels(found):
  return {finding.level for finding in found}


def said(found, level):
  return [f"{f.found} {f.todo}" for f in found if f.level == level]
