"""One decoder for Qwen2.5, Qwen3, Llama-3.x and SmolLM3; see WORKSPACE.md."""
