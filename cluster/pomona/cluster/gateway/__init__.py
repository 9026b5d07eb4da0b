"""The HTTP front of a cluster: OpenAI's API in, `Generate` calls out."""
