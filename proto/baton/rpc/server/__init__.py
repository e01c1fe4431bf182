"""A gRPC server with health, reflection and metrics, which bounds what its clients may send."""
