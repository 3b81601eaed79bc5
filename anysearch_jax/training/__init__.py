"""Training.

* `batching`: trajectories into packed arrays of fixed shapes.
* `logprobs`: token log-probabilities and entropies, chunked over the rows.
* `train_step`: one jitted, donated optimizer step.
* `experience`: groups into rewards, advantages and batches.
* `loop`: rollouts, steps, curriculum, metrics, checkpoints.
* `validation`: which configurations can run.
* `checkpoint`: what a run goes on from; `manifest`: its files by checksum.
* `warm_start`: supervised demonstrations before it.
* `metrics`: jsonl and TensorBoard.
"""
