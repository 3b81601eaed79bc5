"""The same policy in torch: transformers `generate` per turn.

This is what a short script over transformers would do. Turns are left-padded
and generated as one batch, with the whole context computed again every turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

from anysearch_jax import types


class TorchEngine:
  """Samples several turns at once by transformers' `generate`."""

  def __init__(self, folder: str, tokenizer):
    self.model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    ).eval()
    self._tokenizer = tokenizer
    torch.manual_seed(0)

  async def __call__(
    self, requests: Sequence[types.GenerateRequest]
  ) -> list[types.Generation]:
    longest = max(len(r.token_ids) for r in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long)
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
    turns = []
    for i, request in enumerate(requests):
      new = out.sequences[i, longest:].tolist()
      ends = [j for j, token in enumerate(new) if token in enders]
      new = new[: ends[0] + 1] if ends else new
      text = self._tokenizer.decode(new)
      cut = request.cut(text)
      turns.append(
        types.Generation(
          tuple(new),
          tuple(float(logps[i, j, t]) for j, t in enumerate(new)),
          text if cut is None else cut,
          types.Finish.STOP if cut is not None else types.Finish.LENGTH,
          (0,) * len(new),
        )
      )
    return turns
