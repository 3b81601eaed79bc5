"""The retrievers that runs ask: over HTTP, on the web, in this process."""
