"""Keys: who is admitted, how much a day, and what outlives a restart."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import multiprocessing
import os
import sqlite3
import stat

import pytest

from anysearch_jax.host import openai_requests, run_lock
from anysearch_jax.serving import keys

NOON = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
HASH = hashlib.sha256(b"sk-alice").hexdigest()
LIMITS = {"requests": 2, "searches_a_day": 10, "tokens_a_day": 1000}
ALICE = keys.Key("alice", HASH, **LIMITS, max_budget=5)


@pytest.fixture
def clock():
  return [NOON]


@pytest.fixture
def guard(tmp_path, clock):
  made = keys.Guard((ALICE,), tmp_path / "used", now=lambda zone: clock[0])
  yield made
  made.close()


def admitted(guard, key=ALICE, *, searches=1, tokens=1, used=None):
  """Admits a request that uses `used` in the end, all of it by default."""
  wanted = {"searches": searches, "tokens": tokens}
  return guard.admitted(key, **wanted, used=lambda: used or (searches, tokens))


def refusal(guard, key=ALICE, **wanted):
  with pytest.raises(openai_requests.RequestError) as refused:
    with admitted(guard, key, **wanted):
      pass
  return refused.value


def test_added_key_is_shown_once_and_only_its_hash_is_stored(tmp_path):
  path = tmp_path / "keys.json"
  first, second = keys.add(path, "alice"), keys.add(path, "bob")
  assert first != second
  text = path.read_text()
  assert first not in text and second not in text
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  guard = keys.Guard(keys.read(path), tmp_path / "used")
  assert guard.authenticate(f"Bearer {second}").name == "bob"
  with pytest.raises(ValueError, match="alice"):
    keys.add(path, "alice")
  path.write_text("[]")
  with pytest.raises(ValueError, match=r"keys.json: .*expected a JSON object"):
    keys.add(path, "carol")
  path.write_text('{"alice": {')
  with pytest.raises(ValueError, match=r"keys.json: not a whole JSON file"):
    keys.add(path, "carol")


def test_two_processes_lose_no_key(tmp_path):
  path = tmp_path / "keys.json"
  with run_lock.hold(run_lock.path_beside(path)):
    with pytest.raises(ValueError, match=r"keys.json.lock: found it held by"):
      keys.add(path, "alice")
  keys.add(path, "alice")
  assert [key.name for key in keys.read(path)] == ["alice"]


def test_use_that_cannot_be_written_is_503_and_costs_no_answer(guard, tmp_path):
  guard._database.execute("PRAGMA busy_timeout = 1")
  other = sqlite3.connect(tmp_path / "used", isolation_level=None)
  with contextlib.closing(other):
    with admitted(guard, searches=4, used=(1, 1)):
      other.execute("BEGIN IMMEDIATE")
    assert refusal(guard).status_code == 503
    other.execute("ROLLBACK")
  assert guard.usage_today(ALICE) == (4, 1)  # Nothing was given back.
  with admitted(guard, searches=4):
    pass


@pytest.mark.parametrize(
  "header", [None, "", "Bearer", "Bearer x", "Basic sk-alice", "sk-alice"]
)
def test_unknown_key_is_401(guard, header):
  with pytest.raises(openai_requests.RequestError) as refused:
    guard.authenticate(header)
  assert (
    refused.value.status_code == 401 and refused.value.code == "invalid_api_key"
  )


def test_request_is_charged_whole_and_what_it_left_is_given_back(guard):
  with pytest.raises(ZeroDivisionError):
    with admitted(guard, searches=4, tokens=100, used=(1, 30)):
      assert guard.usage_today(ALICE) == (4, 100)
      raise ZeroDivisionError
  assert guard.usage_today(ALICE) == (1, 30)
  # It is never charged more than it was admitted for.
  with admitted(guard, searches=1, tokens=1, used=(9, 9)):
    pass
  assert guard.usage_today(ALICE) == (2, 31)


def test_requests_at_a_time_are_limited(guard):
  with admitted(guard, searches=1, tokens=1):
    with admitted(guard, searches=1, tokens=1):
      found = refusal(guard)
      assert found.status_code == 429 and found.headers == {"retry-after": "1"}
  with admitted(guard, searches=1, tokens=1):
    pass


def test_running_requests_cannot_exceed_the_day_together(guard):
  with admitted(guard, searches=5):
    with admitted(guard, searches=5, used=(0, 0)):
      pass
    found = refusal(guard, searches=5, tokens=1000)
    assert found.status_code == 429 and "tokens" in str(found)
    with admitted(guard, searches=5):
      # The key may have two requests at a time; its searches run out before.
      other = keys.Key("alice", ALICE.sha256, requests=9, searches_a_day=10)
      assert "searches" in str(refusal(guard, other))


def test_what_is_only_reserved_is_soon_given_back(guard):
  with admitted(guard, searches=5, tokens=600):
    refused = refusal(guard, searches=5, tokens=500)
    assert (refused.code, refused.headers["retry-after"]) == (
      "rate_limit_exceeded",
      "1",
    )
    assert refusal(guard, tokens=1001).code == "insufficient_quota"


def test_damaged_file_of_what_was_used_is_one_sentence(tmp_path):
  path = tmp_path / "used.sqlite"
  path.write_text("no database " * 999)
  with pytest.raises(ValueError, match="used.sqlite: "):
    keys.Guard((ALICE,), path)


def test_day_that_is_used_up_ends_at_midnight(guard, clock):
  for _ in range(2):
    with admitted(guard, searches=5, tokens=1):
      pass
  assert refusal(guard).headers["retry-after"] == str(12 * 3600)
  clock[0] = NOON + datetime.timedelta(hours=12)
  with admitted(guard, searches=5, tokens=1):
    assert guard.usage_today(ALICE) == (5, 1)


def test_request_over_midnight_is_given_back_to_its_own_day(guard, clock):
  with admitted(guard, searches=5, used=(2, 1)):
    clock[0] = NOON + datetime.timedelta(days=1)
  assert guard.usage_today(ALICE) == (0, 0)
  clock[0] = NOON
  assert guard.usage_today(ALICE) == (2, 1)


def race(path, barrier, charged):
  """Admits a request of each of 100 keys that may search once a day."""
  names = [keys.Key(f"{n}", searches_a_day=1) for n in range(100)]
  guard = keys.Guard(tuple(names), path)
  barrier.wait(60)
  for key in names:
    with (
      contextlib.suppress(openai_requests.RequestError),
      admitted(guard, key),
    ):
      charged.put(key.name)
  charged.put(None)


def test_processes_that_race_charge_a_key_no_more_than_its_day(tmp_path):
  new = multiprocessing.get_context("spawn")
  charged = new.Queue()
  shared = tmp_path / "used", new.Barrier(3), charged
  racing = [new.Process(target=race, args=shared) for _ in range(3)]
  for each in racing:
    each.start()
  found = [
    n for _ in racing for n in iter(lambda: charged.get(timeout=60), None)
  ]
  assert sorted(found, key=int) == [f"{n}" for n in range(100)]


def test_budget_above_the_keys_is_refused(guard):
  assert refusal(guard, searches=6).status_code == 400


def test_use_outlives_a_restart(tmp_path):
  for expected in ((2, 10), (4, 20)):
    guard = keys.Guard((ALICE,), tmp_path / "used", now=lambda zone: NOON)
    with admitted(guard, searches=2, tokens=10):
      pass
    assert guard.usage_today(ALICE) == expected
    guard.close()


@pytest.mark.parametrize(
  "listed, said",
  [
    ([], "expected a JSON object"),
    ({}, "found no keys"),
    ({"a b": {"sha256": HASH}}, "expected letters, digits"),
    ({"a": {"sha256": "sk-secret"}}, "sha256 is not one"),
    ({"a": {"sha256": HASH, "searches": 3}}, "unknown key 'searches'"),
    ({"a": {"sha256": HASH, "requests": 0}}, "requests: found 0, expected at"),
    ({"a": {"sha256": HASH, "tokens_a_day": "x"}}, "tokens_a_day: found 'x'"),
  ],
)
def test_file_that_is_not_one_is_refused_without_its_secrets(
  tmp_path, listed, said
):
  path = tmp_path / "keys.json"
  path.write_text(json.dumps(listed))
  with pytest.raises(ValueError, match=said) as refused:
    keys.read(path)
  assert "sk-secret" not in str(refused.value)


def test_file_of_keys_is_read_again_when_it_changes(tmp_path, caplog):
  path = tmp_path / "keys.json"
  alice, bob = (keys.add(path, name) for name in ("alice", "bob"))
  guard = keys.Guard(keys.read(path), tmp_path / "used", file=path)

  def admits():
    names = []
    for key in (alice, bob):
      with contextlib.suppress(openai_requests.RequestError):
        names.append(guard.authenticate(f"Bearer {key}").name)
    return names

  assert admits() == ["alice", "bob"]
  whole = path.read_text()
  listed = json.loads(whole)
  del listed["alice"]
  path.write_text(json.dumps(listed))
  assert admits() == ["bob"]
  # In the middle of an edit; the log has one line of it, and no hash.
  path.write_text(whole[:40])
  assert admits() == admits() == ["bob"]
  (line,) = caplog.messages
  assert "last good keys" in line and listed["bob"]["sha256"] not in line
  path.write_text(whole)
  assert admits() == ["alice", "bob"]
  path.write_text("{}")
  assert admits() == []
  path.unlink()
  assert admits() == []
  guard.close()


def test_what_clients_used_is_for_the_user_alone(tmp_path):
  before = os.umask(0)
  try:
    keys.Guard((ALICE,), tmp_path / "used").close()
  finally:
    os.umask(before)
  assert stat.S_IMODE((tmp_path / "used").stat().st_mode) == 0o600
