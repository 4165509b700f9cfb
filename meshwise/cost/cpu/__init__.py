"""What XLA on CPU makes of a per-device program: its kernels, their orders, what they hold."""
