"""An engine that samples with SGLang servers over HTTP."""
