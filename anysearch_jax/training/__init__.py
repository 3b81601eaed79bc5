"""Training: rollouts, rewards, steps, checkpoints.

* `loop`: one run. `learner`, `train_step`: its optimizer steps; `ppo`: what a
  critic adds. `engines`: what it samples with.
* `collection`, `sampler`, `pipeline`: rollouts, also ahead of training.
* `rewards_and_advantages`, `batching`, `logprobs`: episodes to arrays.
* `checkpoint`, `manifest`, `damaged`, `saving`, `resuming`: what a stop leaves.
* `health`, `fingerprint`, `metrics`, `timeline`, `throughput`: what is watched.
* `validation`: which configurations can run.
"""
