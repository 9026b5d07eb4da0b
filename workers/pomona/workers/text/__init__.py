"""Text in and out of tokens: chat templates, incremental detokenisation, stop strings."""
