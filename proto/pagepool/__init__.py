"""The contract: protos, their stubs, the error vocabulary, and how a process serves them."""
