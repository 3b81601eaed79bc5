"""The policy: one decoder for Qwen2.5, Qwen3 and Llama-3.x.

* `architecture`: what differs between families, from a Hugging Face config.
* `table`: path, shape, logical axes and Hugging Face name of each parameter.
* `parameters`, `tensor_files`: initialise, shard, read and write by that table.
* `sharding`: how parameters are sharded over a device mesh.
* `decoder`, `attention`, `embedding`: the forward pass, whole and cached.
* `lora`: low-rank adapters.
* `hf`, `hf_config`, `tokenizer`: reading and writing Hugging Face folders.
"""
