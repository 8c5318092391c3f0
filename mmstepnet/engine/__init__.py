"""What runs around a model: hooks of MMEngine's runner."""
