"""Programs with computation and communication, written with layouts (CoCoNeT, section 2)."""
