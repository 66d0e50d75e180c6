//! From an OpenAI request body to the token ids the engine will see. Pure: no runtime, no network.
