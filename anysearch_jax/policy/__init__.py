"""The policy: one decoder for Qwen2.5, Qwen3 and Llama-3.x.

* `architecture`: what varies between families, read from a Hugging Face config.
* `table`: every parameter's path, shape, logical axes and Hugging Face name.
* `sharding`: how they are cut over a device mesh.
* `attention`: rotary positions and the attention function.
* `transformer`: the Flax modules; full forward and cached forward.
* `lora`: low-rank adapters, beside the weights or merged.
* `hf`: Hugging Face folders in and out.
"""
