"""One decoder for Qwen2.5, Qwen3 and Llama-3.x; see WORKSPACE.md."""
