"""The same policy in torch: transformers `generate` per turn, eager training.

This is what a short script over transformers would do. Pending turns are
left-padded and generated as one batch, with the whole context computed again
every turn. Training is padded forward and backward passes in eager mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch
import transformers

from anysearch_jax import types
from anysearch_jax.training import batching


class TorchEngine:
  """A turn-synchronous `types.Engine` over transformers' `generate`."""

  def __init__(self, folder: str, tokenizer, *, seed: int = 0):
    self.model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    ).eval()
    self._tokenizer = tokenizer
    self._queue: list[tuple[types.GenerateRequest, asyncio.Future]] = []
    self._server: asyncio.Task | None = None
    torch.manual_seed(seed)

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    future = asyncio.get_running_loop().create_future()
    self._queue.append((request, future))
    if self._server is None or self._server.done():
      self._server = asyncio.create_task(self._serve())
    return await future

  def release(self, address: types.Address) -> None:
    del address

  async def _serve(self) -> None:
    while self._queue:
      for _ in range(8):
        await asyncio.sleep(0)
      batch, self._queue = self._queue, []
      self._answer(batch)

  def _answer(self, batch) -> None:
    requests = [request for request, _ in batch]
    longest = max(len(r.token_ids) for r in requests)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, request in enumerate(requests):
      n = len(request.token_ids)
      ids[i, longest - n :] = torch.tensor(request.token_ids)
      mask[i, longest - n :] = 1
    enders = sorted(
      self._tokenizer.end_of_turn_ids
      | {
        i
        for i, text in enumerate(self._tokenizer.token_texts())
        # Added tokens are decoded with a space before them.
        if text.strip() in requests[0].stop
      }
    )
    with torch.inference_mode():
      out = self.model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=min(min(r.max_tokens for r in requests), 64),
        eos_token_id=enders,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
      )
    logps = torch.stack(out.logits, 1).log_softmax(-1)
    for i, (request, future) in enumerate(batch):
      new = out.sequences[i, longest:].tolist()
      ends = [j for j, token in enumerate(new) if token in enders]
      new = new[: ends[0] + 1] if ends else new
      text = self._tokenizer.decode(new)
      cut = request.cut(text)
      future.set_result(
        types.Generation(
          tuple(new),
          tuple(float(logps[i, j, t]) for j, t in enumerate(new)),
          text if cut is None else cut,
          types.Finish.STOP if cut is not None else types.Finish.LENGTH,
          (0,) * len(new),
        )
      )


def step(
  model: torch.nn.Module,
  reference: torch.nn.Module,
  examples: Sequence[batching.Example],
  *,
  learning_rate: float,
  rows: int,
) -> Callable[[], float]:
  """Returns a function that takes an eager GRPO step over padded rows."""
  adam = torch.optim.AdamW(
    model.train().parameters(),
    lr=learning_rate,
    betas=(0.9, 0.98),
    weight_decay=0.01,
  )
  return lambda: _step(model, reference, adam, examples, rows)


def _step(
  model: torch.nn.Module,
  reference: torch.nn.Module,
  optimizer: torch.optim.Optimizer,
  examples: Sequence[batching.Example],
  rows: int,
) -> float:
  optimizer.zero_grad()
  ordered = sorted(examples, key=lambda e: -len(e.token_ids))
  total = 0.0
  for start in range(0, len(ordered), rows):
    part = ordered[start : start + rows]
    longest = max(len(e.token_ids) for e in part)
    ids = torch.zeros(len(part), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    behaviour, weight = torch.zeros(2, len(part), longest)
    advantage = torch.zeros(len(part), 1)
    for i, example in enumerate(part):
      n = len(example.token_ids)
      ids[i, :n] = torch.from_numpy(np.asarray(example.token_ids)).long()
      mask[i, :n] = 1
      behaviour[i, :n] = torch.from_numpy(np.asarray(example.logps))
      weight[i, :n] = torch.from_numpy(np.asarray(example.weights))
      advantage[i] = example.advantage
    logp = _logp(model, ids, mask)
    with torch.no_grad():
      reference_logp = _logp(reference, ids, mask)
    ratio = torch.exp(logp - behaviour[:, 1:])
    surrogate = torch.minimum(
      ratio * advantage, ratio.clamp(0.8, 1.28) * advantage
    )
    gap = reference_logp - logp
    kl = torch.exp(gap) - gap - 1
    loss = (weight[:, 1:] * (0.001 * kl - surrogate)).sum()
    loss.backward()
    total += loss.item()
  torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
  optimizer.step()
  return total


def _logp(model, ids, mask):
  logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
  return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
