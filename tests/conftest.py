"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os

# Set before anything imports jax. Tests of meshes use eight devices; all other
# tests run on the first.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Half of the time is compiling, much of it the same programs in each test: all
# workers and all commands that tests start share them.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  os.path.join(os.path.dirname(__file__), "..", ".jax_cache", "tests"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# What is computed once is compiled faster than it is optimized, which is how
# JAX runs its own tests. `make test-all` runs the programs that users run.
if not os.environ.get("ANYSEARCH_TEST_ALL"):
  os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
  # Without MLIR emitters (JAX 0.12 keeps them) and in one part: half the time.
  os.environ["XLA_FLAGS"] += (
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
  )

import asyncio
import functools
import gc
import inspect
import pathlib
import re
import signal
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from anysearch_jax.policy import tensor_files
from anysearch_jax.policy import tokenizer as tokenizer_lib

# Under `nohup` the commands that tests start would ignore a hangup too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without a deadline, because a busy machine must not fail a test. A test that
# sets its number of examples keeps it.
hypothesis.settings.register_profile(
  "here",
  deadline=None,
  max_examples=100 if os.environ.get("ANYSEARCH_TEST_ALL") else 25,
)
hypothesis.settings.load_profile("here")

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_TOKENIZERS = pathlib.Path(
  os.environ.get("ANYSEARCH_TOKENIZERS", _ROOT / ".." / "shared" / "tokenizers")
)


# Files that take minutes start first, so that no worker is left with one.
_LONGEST = (
  *(
    "test_kills",
    "test_sharded_step",
    "test_process_kills",
    "test_distributed",
  ),
  *("test_examples", "test_critic", "test_ppo_runs", "test_stopping"),
  *("test_trainer_on_a_mesh", "test_outages", "test_engine_compiled"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Sorts the files into the order in which workers take them.

  Chex's variants without jit become slow tests: they compile every operation.
  """
  places = {name: place for place, name in enumerate(_LONGEST)}
  items.sort(key=lambda item: places.get(item.path.stem, len(places)))
  for item in items:
    if item.name.endswith("__without_jit"):
      item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
  """Runs a test that is a coroutine in a loop, for two minutes at most."""
  if not inspect.iscoroutinefunction(pyfuncitem.obj):
    return None
  given = inspect.signature(pyfuncitem.obj).parameters
  test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in given})
  asyncio.run(asyncio.wait_for(test, 120))
  return True


def pytest_collection_finish() -> None:
  """Keeps the garbage collector away from the imported modules.

  A pass over all objects takes a second, and tracing causes many.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
  """Fails a run in which a test was skipped that must not be.

  `ANYSEARCH_MAY_SKIP`: regular expression of the reasons that are accepted.
  """
  accepted = os.environ.get("ANYSEARCH_MAY_SKIP")
  terminal = session.config.pluginmanager.get_plugin("terminalreporter")
  if accepted is None or terminal is None:  # The latter: a worker.
    return
  reasons = {report.longrepr[2] for report in terminal.stats.get("skipped", ())}
  if missed := [x for x in reasons if not re.search(accepted, x)]:
    terminal.section("Skipped, but not in the list of .ci/run")
    terminal.line("\n".join(sorted(missed)))
    session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
  """Drops compiled programs before the kernel's limit of 65,530 memory maps.

  Some files make 13,000, and XLA meets the limit as a segmentation fault.
  """
  yield
  with open("/proc/self/maps", "rb") as maps:
    if sum(1 for _ in maps) > 30_000:
      jax.clear_caches()


@pytest.fixture(scope="session")
def torch():
  """Returns torch, the oracle; tests that need it skip without it."""
  return pytest.importorskip(
    "torch", reason="oracle tests need torch==2.13.0 (the extra [oracles])"
  )


@pytest.fixture
def nothing_loads(monkeypatch):
  """Fails the test if weights are loaded: errors must come before that."""

  def fail(*args):
    raise AssertionError("a parameter was allocated")

  monkeypatch.setattr(tensor_files, "_place", fail)


@pytest.fixture(scope="session")
def make_pair(torch, tmp_path_factory):
  """Makes each of `random_models.CASES` on both sides, once."""
  import pairs

  @functools.cache
  def make(case: str, **sizes):
    return pairs.Pair.random(case, tmp_path_factory.mktemp(case), **sizes)

  return make


@functools.cache
def _real_tokenizer(name: str) -> tokenizer_lib.Tokenizer:
  return tokenizer_lib.Tokenizer.from_folder(_TOKENIZERS / name)


@pytest.fixture
def tokenizers_folder() -> pathlib.Path:
  """Returns the folder of the three families' tokenizers; skips without it."""
  if not _TOKENIZERS.is_dir():
    pytest.skip(
      f"no folder {_TOKENIZERS}; set ANYSEARCH_TOKENIZERS to one with qwen2.5, "
      "qwen3 and llama3.1"
    )
  return _TOKENIZERS


@pytest.fixture(params=["qwen2.5", "qwen3", "llama3.1"])
def real_tokenizer(request) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer of each supported family; skips without it."""
  if not (_TOKENIZERS / request.param / "tokenizer.json").is_file():
    pytest.skip(
      f"no tokenizer in {_TOKENIZERS / request.param}; set "
      "ANYSEARCH_TOKENIZERS to a folder with qwen2.5, qwen3 and llama3.1"
    )
  return _real_tokenizer(request.param)
