"""What runs in a worker process: one MLX rank, its engine, and its gRPC service."""
