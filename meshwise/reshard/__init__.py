"""From one sharding to another: the cheapest sequence of collectives that fits in memory."""
