"""The model worker: weights, KV bytes and paged attention."""
