"""The OpenAI surface: request schemas, rendering to token ids, and the answers, streamed or whole."""
