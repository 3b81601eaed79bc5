"""An engine that samples with servers over HTTP, in the dialect of each."""
