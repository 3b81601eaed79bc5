"""The fake SGLang server as a process that follows the seeds of requests.

Its arguments are a policy, a port and the seconds between tokens. As of a real
one with --enable-deterministic-inference, a turn follows from its context, its
seed and the weights.
"""

from __future__ import annotations

import random
import sys
import threading
import zlib

import fake_sglang
import jax
import numpy as np

from anysearch_jax.policy import hf


class _Server(fake_sglang.Server):
  def _sample(self, request, context, params, most):
    leaves = map(np.asarray, jax.tree.leaves(self.policy.params))
    weights = zlib.crc32(b"".join(x.tobytes() for x in leaves))
    seeded = weights, context, params.get("sampling_seed")
    return super()._sample(request, seeded, params, most)


def _turn(seeded):
  tokens = range(fake_sglang.VOCAB)
  return random.Random(repr(seeded)).choices(tokens, k=fake_sglang.CONTEXT)


if __name__ == "__main__":
  codec = hf.describe(sys.argv[1])[1]
  fake_sglang.tokenizer = lambda: codec
  fake_sglang.VOCAB = fake_sglang.END = codec.vocab_size
  fake_sglang.CONTEXT = 250
  server = _Server(_turn, seconds=float(sys.argv[3]))
  server._http.server_close()
  server._bind(int(sys.argv[2]))
  with server:
    threading.Event().wait()
