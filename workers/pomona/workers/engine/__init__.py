"""One owner's engine: a pure scheduler over three pools, a runner that owns MLX, and the thread between them."""
