"""The contract between the roles: messages, KV geometry, transfer plan, data-plane backends, sessions."""
