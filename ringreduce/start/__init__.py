"""How a rank begins, with `init` or `spawn`, and how its process ends."""
