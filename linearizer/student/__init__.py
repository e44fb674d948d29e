"""The code that travels inside every checkpoint: it needs torch and transformers, and nothing else of this project."""
