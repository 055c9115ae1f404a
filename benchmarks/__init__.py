"""What meshplan costs, beside others in the same run. ``python -m benchmarks --help``."""
