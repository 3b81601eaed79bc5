"""The script that starts SGLang servers, and its API keys."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import sglang

_SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "serve_sglang.sh"
# Replaces the Python of SGLang; prints its arguments.
_ECHO = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def serve(tmp_path):
  """Runs the script; returns SGLang's arguments and the script's output."""
  python = tmp_path / "python"
  python.write_text(_ECHO)
  python.chmod(0o755)

  def run(*flags, code=0, **settings):
    done = subprocess.run(
      [_SCRIPT, "policy", "30000", *flags],
      env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
      | {"PYTHON": str(python)}
      | settings,
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout or "[]"), done.stderr

  return run


@pytest.mark.parametrize("host", ["", "127.1.2.3", "localhost"])
def test_a_server_on_the_loopback_asks_for_no_key(serve, tmp_path, host):
  found, said = serve("--dtype", "float32", HOST=host)
  assert "--config" not in found
  assert found[found.index("--host") + 1] == (host or "127.0.0.1")
  assert found[-2:] == ["--dtype", "float32"]
  assert not said
  assert [path.name for path in tmp_path.iterdir()] == ["python"]


@pytest.mark.parametrize("host", ["10.0.0.7", "::", "node-a"])
def test_a_server_that_others_reach_asks_for_a_key(serve, tmp_path, host):
  found, said = serve("--dtype", "float32", HOST=host)
  file = tmp_path / ".anysearch_sglang_key"
  key = file.read_text()
  assert len(key) == 48 and int(key, 16)
  settings = pathlib.Path(found[found.index("--config") + 1])
  assert settings.read_text() == f"api-key: '{key}'\n"
  for path in (file, settings):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
  # Arguments are seen by every user of the machine, and logs are read.
  assert key not in json.dumps(found) + said
  assert found[-2:] == ["--dtype", "float32"]
  # The next server of the run has the same.
  again, _ = serve(HOST=host)
  assert again[again.index("--config") + 1] == str(settings)
  assert file.read_text() == key


def test_a_server_of_adapters_is_started_as_one_of_launch_node(serve):
  assert "--enable-lora" not in serve()[0]
  found, _ = serve("--dtype", "float32", LORA="16")
  targets = config_lib.LoraConfig().targets
  expected = sglang.adapter_flags(16, targets)
  start = found.index("--enable-lora")
  assert found[start:] == [*expected, "--dtype", "float32"]


@pytest.mark.parametrize("flags", [("--host", "0.0.0.0"), ("--host=0.0.0.0",)])
def test_flags_of_the_server_are_checked(serve, flags):
  found, _ = serve(*flags)
  assert "--config" in found
  found, _ = serve(*flags, "--api-key", "mine")
  assert "--config" not in found
  found, _ = serve("--host", "127.0.0.1", HOST="0.0.0.0")
  assert "--config" not in found


def test_the_trainer_sends_the_key_as_the_script_says(
  serve, tmp_path, monkeypatch
):
  _, said = serve(HOST="0.0.0.0")
  export = next(line for line in said.splitlines() if "export " in line)
  sent = subprocess.check_output(
    ["bash", "-c", f'{export}; printf %s "$SGLANG_KEY"'], text=True
  )
  monkeypatch.setenv("SGLANG_KEY", sent)
  assert "--config.servers.api_key_variable=SGLANG_KEY" in said
  config = config_lib.ServersConfig(api_key_variable="SGLANG_KEY")
  client, _ = server_lib.connect(sglang.SglangServer, config, {})
  key = (tmp_path / ".anysearch_sglang_key").read_text()
  assert client.headers["Authorization"] == f"Bearer {key}"


def test_own_key_is_kept_secret(serve, tmp_path):
  file = tmp_path / "key"
  file.write_text("it's:#mine\n")
  file.chmod(0o644)
  (tmp_path / "key.yaml").touch(0o644)
  found, said = serve(HOST="127.0.0.1", KEY_FILE=str(file))
  assert found[found.index("--config") + 1] == f"{file}.yaml"
  # As YAML quotes it.
  settings = (tmp_path / "key.yaml").read_text()
  assert settings == "api-key: 'it''s:#mine'\n"
  for path in (file, tmp_path / "key.yaml"):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert "#mine" not in said


@pytest.mark.parametrize("text", ["", "two words"])
def test_a_file_without_a_key_starts_no_server(serve, tmp_path, text):
  file = tmp_path / "key"
  file.write_text(text)
  found, said = serve(HOST="0.0.0.0", KEY_FILE=str(file), code=2)
  assert not found
  assert f"{file} holds no key" in said
