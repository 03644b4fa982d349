"""Generated stubs; see the .proto files beside them."""
