"""The prefill role: a vLLM engine whose KV connector pushes each prompt's KV into a decode worker."""
