"""The pool as a pure state machine: no I/O, no clock, no gRPC."""
