//! Simulated engines: real hashing, a prefix cache, KV events over ZeroMQ, the OpenAI API.
