"""Records the answers of a retriever and replays them."""
