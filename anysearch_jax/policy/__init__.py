"""The policy: one decoder for Qwen2.5, Qwen3 and Llama-3.x.

* `architecture`: what varies between families, read from a Hugging Face config.
* `table`: every parameter's path, shape, logical axes and Hugging Face name.
* `parameters`, `tensor_files`: parameters by that table, and safetensors files.
* `sharding`: how parameters are cut over a device mesh.
* `decoder`, `attention`, `embedding`: the forward pass, whole and cached.
* `critic`, `lora`: a value head; low-rank adapters.
* `hf`, `hf_config`, `tokenizer`: Hugging Face folders in and out.
"""
