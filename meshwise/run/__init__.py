"""Running a per-device program: on real devices, or simulated on one."""
