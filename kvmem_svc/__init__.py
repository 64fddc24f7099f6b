"""The KV memory service: owner of every KV block and of every sequence that uses one."""
