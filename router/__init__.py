"""The OpenAI front door: renders, tokenises once, places each request on a (prefill, decode) pair, streams."""
