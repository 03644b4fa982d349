"""The stateless worker: runs transformers models on blocks that memd owns."""
